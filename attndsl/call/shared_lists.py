"""Lists of keys that several layers share: copies that keep the maps made of them.

A call makes a map of its lists (:mod:`.list_maps`), since it cannot see whether the list that it
had before was written meanwhile. Users' kernels do not know these copies, so their maps hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.errors import ArgumentError, DTypeError

from .call_slice import INTS
from .value_checks import has_values

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_KEPT = "_attndsl_maps"
_MOST = 4
"""Maps of a list, each of which may take as much memory as a mask: of few programs, or parts."""


class _Maps(dict["Hashable", tuple[int, torch.Tensor]]):
    """Maps and the list's version that they are of. They are no part of a copy, or of a file."""

    def __reduce__(self) -> tuple[type[_Maps], tuple[()]]:
        """Nothing of it."""
        return _Maps, ()


def shared_list(chosen: torch.Tensor) -> torch.Tensor:
    """Copy a list of keys for several layers, which then prepare it once.

    Each call with ``chosen=`` makes a map of the list before it attends. Calls with the same shared
    list make it once, and on GPUs find the tiles once too. The copy does not change with
    ``chosen``. Write to the copy with torch's operations alone: the next call then makes a new map.

    Args:
        chosen: Ints of any shape, as ``in`` takes them: numbers of keys or of blocks.

    Returns:
        A tensor like ``chosen``. It keeps its maps, 1 byte for each value that the left side of
        ``in`` may have, as long as it lives. In ``torch.compile`` it is a plain copy.

    Raises:
        ArgumentError: ``chosen`` is no tensor.
        DTypeError: It has no ints.
    """
    if not isinstance(chosen, torch.Tensor):
        raise ArgumentError(
            f"a list of keys is a tensor, not {type(chosen).__name__}",
            hint="write attndsl.shared_list(torch.tensor(...))",
        )
    if chosen.dtype not in INTS:
        raise DTypeError(
            f"a list of keys has ints, not {chosen.dtype}",
            hint="give numbers of keys or blocks, as topk(...).indices has them",
        )
    if torch.compiler.is_compiling() or not has_values(chosen):
        return chosen.clone()
    # Results of inference mode have no version, by which later writes are seen.
    with torch.inference_mode(False), torch.no_grad():
        own = torch.empty_like(chosen, requires_grad=False).copy_(chosen)
    setattr(own, _KEPT, _Maps())
    return own


def kept_map(
    listed: torch.Tensor, sizes: tuple[int, int], make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The map that ``make`` makes of ``listed``, or made before if it is a shared list, or of one.

    Args:
        listed: The list of a call.
        sizes: Width and shift of the map.
        make: Makes it anew.
    """
    owner = listed if listed._base is None else listed._base
    maps: _Maps | None = getattr(owner, _KEPT, None)
    if maps is None or not has_values(listed) or _is_captured(listed):
        return make()
    stream = torch.cuda.current_stream(listed.device).cuda_stream if listed.is_cuda else 0
    place = (stream, listed.data_ptr(), listed.dtype, listed.shape, listed.stride(), sizes)
    version = owner._version
    found = maps.get(place)
    if found is None or found[0] != version:
        with torch.inference_mode(False):
            found = version, make()
        maps.pop(place, None)
        for old in list(maps)[: 1 - _MOST]:
            maps.pop(old, None)
        maps[place] = found
    return found[1]


def _is_captured(listed: torch.Tensor) -> bool:
    """Return True while a CUDA graph is captured, whose memory has no values before a replay."""
    return listed.is_cuda and torch.cuda.is_current_stream_capturing()
