"""The page of ``attndsl play``: a program as text, and at once what the compiler makes of it.

:mod:`.http_server` speaks HTTP and :mod:`.worker_pool` keeps the processes that answer. Neither
imports torch. :mod:`.worker` is such a process, and :mod:`.answers` is what it computes.
"""
