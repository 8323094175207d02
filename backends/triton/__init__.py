"""Portable Triton kernels, generated from the program."""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
