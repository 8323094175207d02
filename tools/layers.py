"""The layers of the package, from the lowest to the highest.

The test of imports and the tracer of calls (``ways.py``) read them: a module imports from its own
layer and those below.
"""

from __future__ import annotations

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "foundation", "settings", "source"}),
    frozenset({"call.batched_gradients", "call.op_encoding", "call.torch_ops"}),
    frozenset({"ir"}),
    frozenset({"frontend", "grammar", "passes", "serialise"}),
    frozenset({"layout", "pipeline"}),
    frozenset({"backends"}),
    frozenset({"backends.dense"}),
    frozenset({"backends.tiled"}),
    frozenset({"backends.device"}),
    frozenset({"backends.emit"}),
    frozenset({"backends.gradients"}),
    frozenset({"backends.kernels"}),
    frozenset({"backends.triton"}),
    frozenset({"backends.hopper"}),
    frozenset({"backends.engine"}),
    frozenset({"call.lse_merge", "inspection.tilemap"}),
    frozenset({"call", "config", "inspection", "runtime", "serving"}),
    frozenset(
        {
            "call.argument_type_errors",
            "call.attention_base",
            "call.resolve",
            "call.prepared",
            "call.signature",
        }
    ),
    frozenset({"parallel"}),
    frozenset({"inspection.sparsity_summary"}),
    frozenset({"inspection.example_captures", "inspection.explain", "picture"}),
    frozenset(
        {
            "call.dynamo_call",
            "inspection.analysis",
            "inspection.call_inputs",
            "inspection.dense_views",
            "serving.serve_call",
        }
    ),
    frozenset({"attention"}),
    frozenset({"building.warmup", "inspection.reference_check", "inspection.tolerance"}),
    frozenset({"building"}),
    frozenset({"api"}),
    frozenset({"notebook"}),
    frozenset({"program_join"}),
    frozenset({"compat", "torch_api"}),
    frozenset({"nn"}),
    frozenset({"flex"}),
    frozenset({"hf", "torchtitan"}),
    frozenset({"play"}),
    frozenset({"editors"}),
    frozenset({"__main__", "cli"}),
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
