"""Hooks of the site: what GitHub shows of a page and Python-Markdown would not."""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^```(\w+) +([^\n`]+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page as the site's Markdown has it: titles of snippets, and Markdown in folded parts."""
    titled = _FENCE.sub(_titled, markdown)
    return titled.replace("<details>", '<details markdown="1">')


def _titled(fence: re.Match[str]) -> str:
    """The first line of a snippet whose words say what it is, such as ``train.yaml key=model``."""
    kind, words = fence[1], fence[2].split()
    title = "An error" if words == ["error"] else words[0]
    return f'```{kind} title="{title}"'
