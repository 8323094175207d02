"""Names that differ between the versions of Gluon, 3.6 to 3.9.

Every use of Gluon's Hopper operations goes through this module, so that a new version of Triton
breaks one file.
"""

import triton
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    tma_load = tma.async_load
    tma_store = tma.async_store
else:
    tma_load = tma.async_copy_global_to_shared
    tma_store = tma.async_copy_shared_to_global
tma_wait = tma.store_wait

COPIES_OPERANDS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))
"""Whether ptxas (12.8, 12.9) serialises products whose operands a loop carries; 13.4 does not."""
