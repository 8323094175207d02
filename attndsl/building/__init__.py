"""Bundles of compiled kernels, made where no GPU is."""
