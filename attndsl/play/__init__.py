"""The page of ``attndsl play``: a program's text beside its picture, derivative and costs.

:mod:`.http_server` speaks HTTP and :mod:`.worker_pool` keeps the processes that answer. Neither
imports torch. :mod:`.worker` is such a process, and :mod:`.answers` is what it computes.
"""
