"""Gradients of captured tensors and params: one module for each way to add them up."""
