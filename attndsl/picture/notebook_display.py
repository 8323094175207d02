"""Displays of notebooks: pictures as objects, and programs as pictures with their text."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import AttnDSLError
from attndsl.inspection.example_captures import make_for_picture
from attndsl.source import shorten

from .data import Frame, picture_data
from .highlight import highlighted
from .vector import svg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.pipeline import Lowered

    from .data import PictureData

_FRAME = Frame(64, 64, 16, 16)


class Picture(str):
    """A picture as SVG text, which notebooks draw; ``print`` and files have the text."""

    _what = "a program"

    @classmethod
    def of(cls, data: PictureData) -> Picture:
        """The picture of ``data``."""
        found = cls(svg(data))
        found._what = f"{shorten(data.title, 60)!r}, {data.q_len} x {data.kv_len} pairs"
        return found

    def __repr__(self) -> str:
        return f"<picture of {self._what}; {len(self)} characters of SVG>"

    def _repr_svg_(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return str(self)


def program_html(lowered: Lowered, text: str, given: Mapping[str, Any]) -> str:
    """The picture of a program over its text. What it lacks is made up, and the picture says so.

    Args:
        lowered: The program.
        text: As it was written.
        given: Captures that are bound to it.
    """
    program = highlighted(text)
    try:
        return svg(_with_made_up(lowered, text, given)) + program
    except AttnDSLError as refusal:
        return f"{program}<pre>no picture: {escape(refusal.message)}</pre>"


def _with_made_up(lowered: Lowered, text: str, given: Mapping[str, Any]) -> PictureData:
    made = make_for_picture(lowered.program, _FRAME.sizes(), 0, given)
    numbers = {decl.name for decl in lowered.program.params}
    captures = {**given, **made.tensors, **made.params}
    data = picture_data(
        lowered, _FRAME, title=text,
        tensors={
            n: torch.as_tensor(x, device="cpu") for n, x in captures.items() if n not in numbers
        },
        params={n: x for n, x in captures.items() if n in numbers},
    )  # fmt: skip
    return replace(data, made_up=made.what)


def table_html(programs: Mapping[str, str]) -> str:
    """Texts of programs by name, as a table."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{highlighted(text)}</td></tr>'
        for name, text in programs.items()
    )
    return f"<table>{rows}</table>"
