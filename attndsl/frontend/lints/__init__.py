"""Warnings about valid but probably unintended programs."""
