"""The portable family of kernels: plain Triton, generated from the program."""
