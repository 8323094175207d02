"""attndsl as the attention of Hugging Face's transformers.

``attndsl.hf.register()`` makes ``attn_implementation="attndsl"`` known, and any program behind a
colon: ``attn_implementation="attndsl:q - kv < 1024"``. Needs the extra ``attndsl[hf]``.
"""

from __future__ import annotations

from importlib.util import find_spec

from attndsl.errors import UnsupportedError

if find_spec("transformers") is None:
    raise UnsupportedError(
        "attndsl.hf is for models of transformers, which is not installed",
        hint="pip install 'attndsl[hf]'",
    )

from .registration import register

__all__ = ["register"]
