"""Backends of generated kernels, each of one family or several."""
