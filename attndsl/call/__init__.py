"""Calls of a compiled program: their options, their signature, and the one prepared call."""
