"""Pictures of the package for pages that may be light or dark."""

from __future__ import annotations

COLOURS = {
    "#ffffff": "#0d1117", "#1b1f24": "#e6edf3", "#57606a": "#9198a1", "#e8eaed": "#21262d"
}  # fmt: skip
"""Paper, ink, faint ink and what is empty, as pictures have them, and on dark pages."""


def themed(drawing: str) -> str:
    """A picture of the package that is dark where the page is.

    Pictures have no styles, since notebooks put them into their pages. This one is a file of its
    own: a style changes the colours of paper, ink, faint ink and of what is empty.
    """
    rules = "".join(
        f'[fill="{light}"]{{fill:{colour}}}[stroke="{light}"]{{stroke:{colour}}}'
        for light, colour in COLOURS.items()
    )
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>"
    head = drawing.index(">", drawing.index("<svg")) + 1
    return f"{drawing[:head]}\n{style}{drawing[head:]}"
