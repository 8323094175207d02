"""Calls of an engine: packed queries of several requests over keys in pages."""
