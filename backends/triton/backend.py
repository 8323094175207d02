"""The portable Triton backend: every GPU that Triton has, and its interpreter on CPU tensors."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from attndsl.errors import UnsupportedError
from attndsl.passes.widths import POSITION_LIMIT

from ..base import Gradients
from ..key import KernelKey, source_fingerprint, version_of
from .arguments import Layout, arguments_of, block_widths, capture_arguments, origin
from .compile import Executable, build, is_interpreted, load_module, record, restore
from .generate import generate_backward, generate_forward
from .library import STATISTICS_PADDING, row_statistics
from .specialise import LARGE_GRADIENT, Specialisation, specialise, strides, with_gradients
from .tiles import INTERPRETED, candidates, shared_memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from triton.backends.compiler import GPUTarget

    from attndsl.pipeline import Lowered

    from ..base import Call, Scalar, Store, Wants
    from .tiles import Config

MAX_HEAD_DIM = 512
_STATISTICS_ROWS = 64
PADDING = STATISTICS_PADDING.value
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Module:
    """A generated module, imported."""

    key: str
    source: str
    module: ModuleType
    compiled: dict[str, Any]
    """Per kernel, where its compiled code lies (``compile.record``)."""


class TritonBackend:
    """Generates, compiles and launches kernels; keeps them in memory and in ``store``."""

    name = "triton"
    differentiable = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._modules: dict[str, _Module] = {}
        self._executables: dict[tuple[object, ...], Executable] = {}
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self.kernels_built = 0
        """Kernels compiled (or taken into the interpreter) by this object so far."""

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, or None."""
        if device.type == "cpu":
            if triton.knobs.runtime.interpret:
                return None
            return (
                "Triton compiles for GPUs only "
                "(on CPU tensors, set TRITON_INTERPRET=1 before importing attndsl)"
            )
        if device.type != "cuda":
            return f"Triton has no target for device type {device.type!r}"
        if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8:
            return "the kernels need compute capability 8.0 or higher"
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse by name what these kernels cannot do."""
        program = lowered.program
        for what, present in (
            ("sink", program.sink),
            ("weights", program.weights),
            ("dropout", program.dropout),
        ):
            if present is not None:
                raise UnsupportedError(
                    f"the triton backend has no kernels for '{what}' yet",
                    present.span,
                    "use backend='reference' for this program",
                )
        if call.q.dtype not in _DTYPES:
            raise UnsupportedError(
                f"the triton backend computes in fp16, bf16 and fp32, not {call.q.dtype}",
                hint="convert q, k and v, or use backend='reference'",
            )
        for name, width in (("q", call.q.shape[-1]), ("v", call.v.shape[-1])):
            if not 1 <= width <= MAX_HEAD_DIM:
                raise UnsupportedError(
                    f"the triton backend takes head dims from 1 to {MAX_HEAD_DIM}, "
                    f"and {name} has {width}",
                    hint="use backend='reference'",
                )
        for name, offset, length in (
            ("q_offset", call.q_offset, call.q.shape[2]),
            ("kv_offset", call.kv_offset, call.k.shape[2]),
        ):
            reach = length + (abs(offset) if isinstance(offset, int) else 0)
            if reach >= POSITION_LIMIT:
                raise UnsupportedError(
                    f"positions reach {reach}; the kernels count below {POSITION_LIMIT}",
                    hint=f"use a smaller {name}",
                )

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        q, v = call.q, call.v
        batch, heads, q_len, _ = q.shape
        out = q.new_empty((batch, heads, q_len, v.shape[-1]))
        lse = q.new_empty((batch, heads, q_len), dtype=torch.float32)
        if lse.numel() == 0:
            return out, lse
        layout = self._layout(lowered, call, "forward")
        kernel = layout.executables["forward"]
        tiles = -(-q_len // kernel.config.block_m)
        with _on(q.device):
            kernel.launch(
                tiles * batch * heads,
                _stream(q.device),
                [
                    q, call.k, call.v, out, lse, *layout.strides, *strides(out)[:3], call.scale,
                    *layout.sizes, origin(call.q_offset, call.q_index),
                    origin(call.kv_offset, call.kv_index), *capture_arguments(layout.special, call),
                ],
            )  # fmt: skip
        return out, lse

    def backward(
        self,
        lowered: Lowered,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wants: Wants,
    ) -> Gradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        captures = wants.tensors or wants.params
        if captures and call.deterministic:
            raise UnsupportedError(
                "the triton backend adds up gradients of captured tensors and params with atomics, "
                "whose order varies from run to run",
                hint="drop deterministic=True, or use backend='reference'",
            )
        q, k, v = call.q, call.k, call.v
        batch, heads, q_len, _ = q.shape
        if grad_out.numel() and grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        large = {name for name in wants.tensors if call.tensors[name].numel() >= LARGE_GRADIENT}
        buffers = {
            name: torch.zeros(
                call.tensors[name].shape,
                dtype=torch.float32 if name in large else torch.float64,
                device=q.device,
            )
            for name in sorted(wants.tensors)
        } | {
            name: torch.zeros((), dtype=torch.float64, device=q.device)
            for name in sorted(wants.params)
        }
        dq = (
            torch.zeros_like(q, memory_format=torch.contiguous_format)
            if lse.numel() == 0
            else q.new_empty(q.shape)
        )
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        if lse.numel() == 0:
            dk.zero_(), dv.zero_()
        else:
            layout = self._layout(lowered, call, "backward", grad_out, wants, grad_lse is not None)
            padded = -(-q_len // PADDING) * PADDING
            lse2, delta = lse.new_empty((2, batch, heads, padded))
            stream = _stream(q.device)
            grad_strides = strides(grad_out)[:3]
            rows = layout.executables["row_statistics"]
            shared = [*layout.strides, *grad_strides, call.scale, *layout.sizes,
                      origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                      *capture_arguments(layout.special, call)]  # fmt: skip
            with _on(q.device):
                rows.launch(
                    padded // _STATISTICS_ROWS * batch * heads, stream,
                    [out, grad_out, lse, lse if grad_lse is None else grad_lse.contiguous(),
                     lse2, delta,
                     *strides(out)[:3], *grad_strides, heads, q_len],
                )  # fmt: skip
                if (wants.k or wants.v) and k.shape[2]:
                    kernel = layout.executables["backward_kv"]
                    tiles = -(-k.shape[2] // kernel.config.block_n)
                    kernel.launch(
                        tiles * batch * k.shape[1], stream,
                        [q, k, v, grad_out, dk, dv, lse2, delta, *shared],
                    )  # fmt: skip
                if wants.q or captures:
                    kernel = layout.executables["backward_q"]
                    tiles = -(-q_len // kernel.config.block_m)
                    kernel.launch(
                        tiles * batch * heads, stream,
                        [q, k, v, grad_out, dq, lse2, delta, *shared,
                         *_gradient_arguments(buffers)],
                    )  # fmt: skip
        return Gradients(
            q=dq if wants.q else None,
            k=dk if wants.k else None,
            v=dv if wants.v else None,
            tensors={name: buffers[name].to(call.tensors[name].dtype) for name in wants.tensors},
            params={name: buffers[name].to(_dtype(call.params[name])) for name in wants.params},
        )

    def _layout(
        self,
        lowered: Lowered,
        call: Call,
        kind: str,
        grad_out: torch.Tensor | None = None,
        wants: Wants | None = None,
        has_dlse: bool = False,
    ) -> Layout:
        """What calls of this signature share: kernels, strides and sizes."""
        key = (*_signature(lowered, call, kind, grad_out), wants, has_dlse)
        layout = self._layouts.get(key)
        if layout is None:
            with self._lock:
                grads = () if grad_out is None else (grad_out,)
                special = _special(lowered, call, grads, wants)
                layout = self._new_layout(lowered, call, kind, special, has_dlse)
                if len(self._layouts) >= 4096:
                    self._layouts.clear()
                self._layouts[key] = layout
        return layout

    def _new_layout(
        self, lowered: Lowered, call: Call, kind: str, special: Specialisation, has_dlse: bool
    ) -> Layout:
        interpreted = is_interpreted(row_statistics)
        target = None if interpreted else triton.runtime.driver.active.get_current_target()
        precision = _precision(call.q.dtype, target)
        module = self._module(lowered, kind, special, target, precision)
        functions = (
            {"forward": module.module.attention_forward}
            if kind == "forward"
            else {
                "backward_kv": module.module.attention_backward_kv,
                "backward_q": module.module.attention_backward_q,
            }
        )
        executables = {
            name: self._executable(
                module, name, function, special, target, precision, call.q.device, {}
            )
            for name, function in functions.items()
        }
        if kind == "backward":
            more = {"ROWS": _STATISTICS_ROWS, "HAS_DLSE": has_dlse}
            executables["row_statistics"] = self._executable(
                module,
                "row_statistics",
                row_statistics,
                special,
                target,
                precision,
                call.q.device,
                more,
            )
        steps = tuple(s for t in (call.q, call.k, call.v) for s in strides(t)[:3])
        batch, heads, q_len, _ = call.q.shape
        sizes = (batch, heads, call.k.shape[1], q_len, call.k.shape[2])
        return Layout(special, executables, steps, sizes)

    def _module(
        self,
        lowered: Lowered,
        kind: str,
        special: Specialisation,
        target: GPUTarget | None,
        precision: str,
    ) -> _Module:
        key = KernelKey(
            program=lowered.digest,
            kind=kind,
            special=repr(special),
            options=f"precision={precision}",
            target="interpreter" if target is None else f"{target.backend}:{target.arch}",
            torch=torch.__version__,
            triton=triton.__version__,
            attndsl=version_of("attndsl"),
            fingerprint=source_fingerprint(),
        ).digest()
        module = self._modules.get(key)
        if module is None:
            entry = self._store.load(key)
            if entry is None:
                generate = generate_forward if kind == "forward" else generate_backward
                entry = self._store.save(key, generate(lowered, special), {"compiled": {}})
            compiled = entry.meta.get("compiled", {})
            if not isinstance(compiled, dict):
                compiled = {}
            module = _Module(key, entry.source, load_module(entry.path, key), dict(compiled))
            self._modules[key] = module
        return module

    def _executable(
        self,
        module: _Module,
        name: str,
        function: object,
        special: Specialisation,
        target: GPUTarget | None,
        precision: str,
        device: torch.device,
        more: Mapping[str, int | bool],
    ) -> Executable:
        key = (module.key, name, device, tuple(more.values()))
        executable = self._executables.get(key)
        if executable is None:
            arguments = arguments_of(function, special, precision, target is None, more)
            slot = "_".join([name, *map(str, more.values())])
            recorded = module.compiled.get(slot)
            if recorded is not None and target is not None:
                executable = restore(function, arguments, recorded)
            if executable is None:
                executable = build(
                    function,
                    arguments,
                    self._configs(name, special, target, device),
                    target,
                    _shared_memory(target, device),
                    load=True,
                )
                self.kernels_built += 1
                if target is not None:
                    module.compiled[slot] = record(executable)
                    meta = {"compiled": module.compiled}
                    self._store.save(module.key, module.source, meta)
            self._executables[key] = executable
        return executable

    def _configs(
        self, name: str, special: Specialisation, target: GPUTarget | None, device: torch.device
    ) -> tuple[Config, ...]:
        if target is None:
            return INTERPRETED
        size = 4 if special.dtype == "fp32" else 2
        kernel = "backward_q" if name == "row_statistics" else name
        return candidates(
            kernel,
            *block_widths(special),
            size,
            _shared_memory(target, device),
        )


def _special(
    lowered: Lowered, call: Call, grads: tuple[torch.Tensor, ...], wants: Wants | None
) -> Specialisation:
    special = specialise(lowered.program, call, *grads)
    return special if wants is None else with_gradients(special, call, wants.tensors, wants.params)


def _signature(
    lowered: Lowered, call: Call, kind: str, grad_out: torch.Tensor | None
) -> tuple[object, ...]:
    """What a :class:`Layout` depends on; cheap, since every call makes one."""
    q, k, v = call.q, call.k, call.v
    tensors = (q, k, v) if grad_out is None else (q, k, v, grad_out)
    return (
        lowered.digest,
        kind,
        q.dtype,
        q.device,
        call.scale < 0,
        torch.get_float32_matmul_precision(),
        tuple((t.shape, t.stride(), t.data_ptr() % 16) for t in tensors),
        tuple((t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in call.tensors.values()),
        tuple(map(_param_class, call.params.values())),
        None if call.q_index is None else call.q_index.dtype,
        None if call.kv_index is None else call.kv_index.dtype,
        None if isinstance(call.q_offset, int) else call.q_offset.dtype,
        None if isinstance(call.kv_offset, int) else call.kv_offset.dtype,
    )  # fmt: skip


def _param_class(value: Scalar | torch.Tensor) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype
    return isinstance(value, int) and value.bit_length() > 31


def _gradient_arguments(buffers: Mapping[str, torch.Tensor]) -> list[Any]:
    arguments: list[Any] = []
    for buffer in buffers.values():
        arguments.append(buffer)
        arguments += buffer.stride()
    return arguments


def _dtype(value: object) -> torch.dtype:
    assert isinstance(value, torch.Tensor)
    return value.dtype


def _precision(dtype: torch.dtype, target: GPUTarget | None) -> str:
    """Input precision of fp32 products: as torch's own matrix products are set."""
    if dtype is not torch.float32 or target is None or target.backend != "cuda":
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _shared_memory(target: GPUTarget | None, device: torch.device) -> int:
    if target is None:
        return shared_memory_of("")
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def _stream(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return contextlib.nullcontext()
