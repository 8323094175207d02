"""Local memory of a thread, read from compiled code, which is an ELF file.

NVIDIA's section ``.nv.info`` is a list of attributes. Each is a byte for the form, a byte for the
attribute, two bytes for a value or for the length of what follows. See ``EIATTR_FRAME_SIZE`` in
the output of ``cuobjdump --dump-elf``.

Non-goals: registers; code of several kernels.
"""

from __future__ import annotations

import struct

from attndsl.errors import BackendError

_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian."""
_INFO = b".nv.info"
_FRAME_SIZE = 0x11
_SIZED = 4
"""The form of attributes whose values follow them."""


def local_bytes(code: bytes) -> int:
    """Bytes of memory of its own that a thread has: for what it spills, and for local arrays.

    Raises:
        BackendError: ``code`` is no compiled code of NVIDIA's.
    """
    try:
        return max(_frames(code), default=0)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise BackendError(
            f"compiled code cannot be read: {error}", hint="report the version of Triton"
        ) from error


def _frames(code: bytes) -> list[int]:
    """Bytes that each function of ``code`` has for a thread."""
    if not code.startswith(_MAGIC):
        raise ValueError("it is no ELF file")
    offset = struct.unpack_from("<Q", code, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", code, offset + size * n) for n in range(count)]
    strings = sections[names][4]
    for name, _, _, _, start, length in sections:
        if _string(code, strings + name) == _INFO:
            return _frame_sizes(code[start : start + length])
    raise ValueError("it has no section .nv.info")


def _string(code: bytes, start: int) -> bytes:
    return code[start : code.index(b"\0", start)]


def _frame_sizes(info: bytes) -> list[int]:
    found, place = [], 0
    while place < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == _SIZED:
            if attribute == _FRAME_SIZE:
                found.append(struct.unpack_from("<II", info, place)[1])
            place += value
    return found
