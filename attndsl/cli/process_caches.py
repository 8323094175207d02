"""``attndsl cache stats --memory``: the caches of a process."""

from __future__ import annotations

from contextlib import suppress

import torch

from attndsl.api import Options, compile_source
from attndsl.call.dispatch import BACKENDS, get_backend
from attndsl.errors import AttnDSLError
from attndsl.foundation.caches import CACHES, CacheStatistics
from attndsl.source import Source

from .example_options import make_captures
from .run_command import Shapes, random_inputs

_SHAPES = Shapes(1, 2, 2, 128, 128, 16, 16, "fp32", "cpu")


def print_memory(text: str) -> None:
    """Caches of this process, with the backends that load here, after a small call on the CPU.

    Raises:
        AttnDSLError: The program ``text`` has errors.
    """
    attention, generator = compile_source(Source(text), {}, Options()), torch.Generator()
    operands = random_inputs(_SHAPES, generator.manual_seed(0))[:3]
    captures = make_captures(attention.lowered.program, _SHAPES.sizes(), "cpu", generator)
    attention(*operands, captures=captures)
    for name in BACKENDS:
        with suppress(AttnDSLError):  # ``attndsl doctor`` says why one does not load.
            get_backend(name)
    rows = [CacheStatistics._fields, *map(_row, CACHES.statistics())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers, reasons in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=False)]
        print("  ".join([name.ljust(widths[0]), *cells, reasons]).rstrip())


def _row(cache: CacheStatistics) -> tuple[str, ...]:
    name, *numbers, reasons = cache
    words = ", ".join(sorted(reason.name.lower() for reason in reasons))
    return (name, *("few" if number is None else str(number) for number in numbers), words)
