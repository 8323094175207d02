"""Docstrings of the package as the site's reader of docstrings takes them.

Roles such as ``:func:`compile``` become names. ``Example:`` becomes ``Examples:``, which shows
sessions as code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([\w.]+)`")


_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


class Plain(griffe.Extension):
    """Change the docstrings of all objects."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """A docstring without roles, whose examples are sections."""
    named = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    return _EXAMPLE.sub(r"\1Examples:", named)
