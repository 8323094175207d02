"""Calls of tensors that several processes have parts of."""
