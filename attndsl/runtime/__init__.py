"""Disk cache, bundles, tuning results and source texts of programs and kernels."""
