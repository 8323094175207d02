"""What is read from compiled code."""

import struct

import pytest

from attndsl.backends.kernels.cubin import local_bytes
from attndsl.errors import BackendError

NAMES = b"\0.nv.info\0.text\0"


def code(*attributes, info=b".nv.info"):
    """An ELF file with a section of NVIDIA's attributes."""
    body = b"".join(
        struct.pack("<BBH", form, attribute, value if isinstance(value, int) else len(value))
        + (b"" if isinstance(value, int) else value)
        for form, attribute, value in attributes
    )
    names = NAMES.replace(b".nv.info", info)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    start = 64 + len(names) + len(body)
    struct.pack_into("<Q", header, 0x28, start)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 1)
    sections = [(0, 0, 0), (0, 64, len(names)), (1, 64 + len(names), len(body))]
    table = b"".join(
        struct.pack("<IIQQQQ", name, 0, 0, 0, offset, size).ljust(64, b"\0")
        for name, offset, size in sections
    )
    return bytes(header) + names + body + table


def frame(symbol, size):
    return 4, 0x11, struct.pack("<II", symbol, size)


OTHER = [(3, 0x1B, 255), (2, 0x4A, 1), (1, 0x01, 0), (4, 0x2F, struct.pack("<II", 3, 168))]


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ([], 0),
        (OTHER, 0),
        ([*OTHER, frame(3, 872), *OTHER], 872),
        ([frame(3, 0), frame(4, 24)], 24),
    ],
)
def test_the_frame_of_a_thread_is_found(attributes, size):
    assert local_bytes(code(*attributes)) == size


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x7fELF", b"MZ" * 100, code(frame(1, 8))[:-100], code(frame(1, 8))[:70],
        code(info=b".no.info"), b"\x7fELF\x02\x01" + b"\xff" * 200,
        code((4, 0x11, b"")),
    ],
)  # fmt: skip
def test_other_files_are_refused(content):
    with pytest.raises(BackendError, match="compiled code cannot be read"):
        local_bytes(content)
