"""What Dynamo says of an error that attndsl raises while a graph is made."""

from __future__ import annotations


def shown(words: str, kind: str) -> str:
    """A pattern of ``words``; of an error, Dynamo shows the class alone with torch 2.11."""
    return rf"{words}|raised exception {kind}\(\(\)\)"
