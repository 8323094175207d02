"""Pictures as files."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from attndsl.errors import ArgumentError
from attndsl.source import shorten

from .raster import by_matplotlib
from .text_picture import text
from .vector import svg

if TYPE_CHECKING:
    from os import PathLike

    from .data import PictureData

SUFFIXES = (".svg", ".png", ".html", ".txt", ".pdf")


def write(data: PictureData, path: str | PathLike[str]) -> None:
    """Write ``data`` as a file of the kind that the suffix names: one of :data:`SUFFIXES`.

    Raises:
        ArgumentError: Another suffix, or a file that cannot be written.
        UnsupportedError: PNG or PDF without matplotlib.
    """
    suffix = check_path(path)
    if suffix in (".png", ".pdf"):
        by_matplotlib(data, path, suffix[1:])
        return
    if suffix == ".svg":
        content = '<?xml version="1.0" encoding="UTF-8"?>\n' + svg(data)
    elif suffix == ".html":
        heading = escape(shorten(data.title, 100))
        content = (
            f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
            f"<title>{heading}</title></head>\n<body>\n{svg(data)}</body>\n</html>\n"
        )
    else:
        content = text(data)
    try:
        Path(path).write_text(content, "utf-8")
    except OSError as error:
        raise ArgumentError(
            f"cannot write {path}: {error.strerror or error}",
            hint="give a file in a folder that exists and may be written to",
        ) from error


def check_path(path: str | PathLike[str]) -> str:
    """The suffix of ``path``, in lower case.

    Raises:
        ArgumentError: It is none that :func:`write` knows.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        shown = f"'{suffix}'" if suffix else "none"
        raise ArgumentError(
            f"the suffix of {str(path)!r} is {shown}, which is no kind of picture",
            hint=f"use one of {', '.join(SUFFIXES)}",
        )
    return suffix
