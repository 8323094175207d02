"""Kernel templates: Python files whose lines ``#: name`` are filled in by ``generate.py``.

They are read as text and never imported.
"""
