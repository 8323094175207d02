"""Pictures of a program at a small length: the pairs it keeps, its tiles, and its scores.

:func:`picture_data` finds out, :func:`svg`, :func:`text` and :func:`png` draw, :func:`write` picks
one of them by a file's suffix. Only PNG files need matplotlib.
"""

from __future__ import annotations

from .data import PictureData, picture_data
from .files import check_path, write
from .plain import text
from .raster import png
from .vector import svg

__all__ = ["PictureData", "check_path", "picture_data", "png", "svg", "text", "write"]
