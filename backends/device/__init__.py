"""Device code that knows no family of kernels."""
