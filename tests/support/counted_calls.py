"""Calls of a fresh process as on a GPU that is not there, and what they compile: run as a program.

    counted_calls.py TARGET CALLS [SHIPPED]

``CALLS`` is a list in JSON. A call has ``text``, ``dtype``, ``q`` and ``k`` (shapes), and may have
``captures`` (name -> [shape, dtype]), ``params``, ``options``, ``learned`` (names, or null for no
backward), ``lse`` and ``backend``. It is made by ``Attention.__call__``, whose backend believes
that it runs on the GPU. ``SHIPPED`` is the folder of bundles that came with the package, which
``ATTNDSL_SHIPPED`` turns off. A line of JSON says how many kernels Triton compiled (``compiled``),
what a C compiler made (``launchers``), and what took how many seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import triton

import attndsl
from attndsl.backends.engine.backend import GeneratedBackend
from attndsl.backends.kernels.offline_gpu import AbsentGPU
from attndsl.call import dispatch
from attndsl.runtime import bundle_store


def main() -> None:
    target, calls = sys.argv[1], json.loads(sys.argv[2])
    if len(sys.argv) > 3:
        bundle_store.SHIPPED = Path(sys.argv[3])
    AbsentGPU(target).activate()
    counts = {"compiled": 0, "launchers": 0}
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    counting(triton, "compile", "compiled", counts)
    counting(triton.runtime.build, "_build", "launchers", counts)
    GeneratedBackend.why_not = lambda self, device: None  # type: ignore[method-assign]
    kind = "auto" if target == "cuda:90" else "triton"
    dispatch._default = lambda device, dtype: (kind, "as on the GPU")  # type: ignore[assignment]
    dispatch._target_of = lambda device: target  # type: ignore[assignment]
    for call in calls:
        for direction, took in made(call).items():
            seconds[direction].append(round(took, 3))
    print(json.dumps({**counts, "seconds": seconds}))


def counting(module: object, name: str, counted: str, counts: dict[str, int]) -> None:
    original = getattr(module, name)

    def count(*arguments: object, **more: object) -> object:
        counts[counted] += 1
        return original(*arguments, **more)

    setattr(module, name, count)


def made(call: dict) -> dict[str, float]:
    """The seconds of a call, and of its backward."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = kinds[call["dtype"]]
    q = torch.zeros(call["q"], dtype=dtype)
    k, v = torch.zeros(2, *call["k"], dtype=dtype)
    captures = {
        name: torch.zeros(shape, dtype=kinds.get(kind) or getattr(torch, kind))
        for name, (shape, kind) in call.get("captures", {}).items()
    }
    given = captures | call.get("params", {})
    options = dict(call.get("options", {}))
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = torch.tensor(value, dtype=torch.int32)
    attention = attndsl.compile(call["text"], backend=call.get("backend", "auto"))
    learned = call.get("learned")
    inputs = []
    if learned is not None:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        for name in learned:
            given[name] = torch.as_tensor(given[name], dtype=torch.float32).requires_grad_()
            inputs.append(given[name])
    begin = time.perf_counter()
    found = attention(q, k, v, captures=given, return_lse=call.get("lse", False), **options)
    took = {"forward": time.perf_counter() - begin}
    if learned is not None:
        outputs = found if isinstance(found, tuple) else (found,)
        begin = time.perf_counter()
        torch.autograd.grad(outputs, inputs, [torch.zeros_like(x) for x in outputs])
        took["backward"] = time.perf_counter() - begin
    return took


if __name__ == "__main__":
    main()
