"""Attention tile by tile, in torch operations, and what kernels leave to these."""
