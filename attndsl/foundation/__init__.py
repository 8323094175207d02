"""Helpers that every other module may import."""
