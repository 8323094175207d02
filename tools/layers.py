"""The layers of the package, from the lowest to the highest.

The test of imports and the tracer of calls (``ways.py``) read them: a module imports from its own
layer and those below.
"""

from __future__ import annotations

LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {
            "errors",
            "source",
            "settings",
            "logs",
            "after_torch",
            "fingerprint",
            "foundation",
            "reading",
            "scalars",
            "uncollected",
        }
    ),
    frozenset({"operands", "operators", "vectorized"}),
    frozenset({"ir"}),
    frozenset({"frontend", "passes", "serialise", "grammar"}),
    frozenset({"pipeline", "layout"}),
    # What stands in backends/ itself is all for the base.
    frozenset({"backends"}),
    frozenset({"backends.dense"}),
    frozenset({"backends.tiled"}),
    frozenset({"backends.device"}),
    frozenset({"backends.emit"}),
    frozenset({"backends.gradients"}),
    frozenset({"backends.kernels"}),
    frozenset({"backends.triton"}),
    frozenset({"backends.hopper"}),
    frozenset({"backends.generated"}),
    frozenset({"tilemap", "merging"}),
    frozenset({"runtime", "config", "call.options"}),
    frozenset({"call", "compiled", "refusals"}),
    frozenset({"parallel"}),
    frozenset({"saving"}),
    frozenset({"explain", "picture", "made_up"}),
    frozenset(
        {
            "analysis",
            "in_graphs",
            "introspection",
            "serving",
            "views",
        }
    ),
    frozenset({"attention"}),
    frozenset({"warming", "comparing", "tolerance"}),
    frozenset({"building"}),
    frozenset({"api"}),
    frozenset({"notebook"}),
    frozenset({"joining"}),
    frozenset({"torch_api", "compat"}),
    frozenset({"nn"}),
    frozenset({"flex"}),
    frozenset({"hf", "torchtitan"}),
    frozenset({"play"}),
    frozenset({"editors"}),
    frozenset({"cli", "__main__"}),
)
"""Names of modules within ``attndsl``, each for itself and all below it."""


def layer_of(module: str) -> int | None:
    """Number of the layer of a module, by its dotted name; None where no layer names it."""
    parts = module.split(".")[1:]
    while parts:
        name = ".".join(parts)
        found = next((number for number, names in enumerate(LAYERS) if name in names), None)
        if found is not None:
            return found
        parts.pop()
    return None
