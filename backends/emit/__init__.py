"""The text of kernels: a program's expressions, printed into templates."""
