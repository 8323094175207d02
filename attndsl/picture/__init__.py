"""Pictures of a program at a small length: the pairs it keeps, its tiles, and its scores.

:func:`picture_data` finds out, :func:`svg`, :func:`text` and :func:`png` draw, :func:`write` picks
one of them by a file's suffix. Only PNG and PDF files need matplotlib.
"""

from __future__ import annotations

from .data import Frame, PictureData, picture_data
from .highlight import highlighted
from .image_files import check_path, write
from .notebook_display import Picture, program_html, table_html
from .raster import png
from .text_picture import text
from .vector import svg

__all__ = [
    "Frame", "Picture", "PictureData", "check_path", "highlighted", "picture_data", "png",
    "program_html", "svg", "table_html", "text", "write",
]  # fmt: skip
