"""The public face: ``compile``, ``load`` and ``Attention``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Call, Wants
from attndsl.config import read_config
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.frontend.declare import Bound, ParamSpec, TensorSpec
from attndsl.runtime.arguments import bind, rows_contiguous
from attndsl.runtime.autograd import attend
from attndsl.runtime.dispatch import check_backend_name, choose_backend
from attndsl.runtime.operator import attend_in_graph
from attndsl.runtime.programs import lowered_program, make_spec
from attndsl.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from attndsl.backends.base import Backend, Scalar
    from attndsl.frontend.declare import Declared
    from attndsl.pipeline import Lowered

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_SIGNATURES = 4096


def compile(  # noqa: A001
    text: str,
    *,
    backend: str = "auto",
    name: str = "<program>",
    checked: bool | None = None,
    first_line: int = 1,
    **names: Scalar | torch.Tensor | TensorSpec,
) -> Attention:
    """Compile an attention program.

    Args:
        text: The program, in the language of ``docs/language.md``.
        backend: ``auto`` (Triton on GPUs, the reference on CPUs), ``reference`` or ``triton``.
        name: What errors call the text, such as a file's name.
        checked: Whether out-of-range lookups of live pairs are errors (reference backend only);
            by default what ``ATTNDSL_CHECKED`` says.
        first_line: Line number of the text's first line within ``name``.
        **names: Names that count as declared: a number is a param bound to that value; a tensor is
            a captured tensor (0-d: a param), and its value unless a call gives another;
            ``attndsl.tensor("heads")`` declares one without a value.

    Returns:
        A callable; nothing is compiled for a device before its first call.

    Raises:
        AttnDSLError: All that is wrong with the program; :class:`~attndsl.errors.ProgramErrors`
            where there is more than one error.

    Example:
        >>> import torch, attndsl
        >>> attn = attndsl.compile("causal() and q - kv < window", window=1024)
        >>> q = k = v = torch.randn(1, 2, 16, 8)
        >>> attn(q, k, v).shape
        torch.Size([1, 2, 16, 8])
    """
    if not isinstance(text, str):
        raise ArgumentError(
            f"the program is a {type(text).__name__}", hint="pass the program's text"
        )
    check_backend_name(backend)
    declared: dict[str, Declared] = {}
    defaults: dict[str, torch.Tensor] = {}
    for key, value in names.items():
        declared[key] = _declared(key, value)
        if isinstance(value, torch.Tensor):
            defaults[key] = value
    spec = make_spec(text, name, first_line, declared)
    checked = read_settings().checked if checked is None else checked
    return Attention(spec, text, backend, checked, defaults)


def load(
    path: str | PathLike[str], *, backend: str = "auto", checked: bool | None = None
) -> dict[str, Attention]:
    """Compile all programs of a YAML, TOML or JSON file.

    Args:
        path: The file: a mapping from names to programs, or to ``{program: ..., params: {...}}``.
        backend: As for :func:`compile`.
        checked: As for :func:`compile`.

    Returns:
        The compiled programs by name, in the order of the file.

    Raises:
        ConfigError: The file does not hold programs in that form.
        AttnDSLError: A program has errors; they name the file and the line in it.
    """
    return {
        entry.name: compile(
            entry.text,
            backend=backend,
            name=entry.source_name,
            checked=checked,
            first_line=entry.first_line,
            **entry.params,
        )
        for entry in read_config(path)
    }


def _declared(name: str, value: object) -> Declared:
    if isinstance(value, TensorSpec):
        return value
    if isinstance(value, bool | int | float):
        return Bound(value)
    if isinstance(value, torch.Tensor):
        kind = (
            "float" if value.is_floating_point() else "bool" if value.dtype is torch.bool else "int"
        )
        if value.dim() == 0:
            return ParamSpec(kind)
        return TensorSpec(tuple(f"{name}_dim{dim}" for dim in range(value.dim())), kind)
    raise ArgumentError(
        f"{name} is a {type(value).__name__}",
        hint="pass a number, a tensor or attndsl.tensor('heads')",
    )


class Attention:
    """A compiled program: call it with q, k and v. Immutable; made by :func:`compile`.

    Attributes:
        text: The program's text.
        backend: The backend asked for.
    """

    __slots__ = ("_backend", "_checked", "_defaults", "_lowered", "_prepared", "_spec", "_text")

    def __init__(
        self,
        spec: str,
        text: str,
        backend: str,
        checked: bool,
        defaults: Mapping[str, torch.Tensor],
    ) -> None:
        """Use :func:`compile`."""
        self._spec = spec
        self._text = text
        self._backend = backend
        self._checked = checked
        self._defaults = dict(defaults)
        self._lowered = lowered_program(spec)
        # What validation found, by the call's shapes, strides and dtypes.
        self._prepared: dict[Any, tuple[Backend, Call]] = {}

    @property
    def text(self) -> str:
        """The program's text."""
        return self._text

    @property
    def backend(self) -> str:
        """The backend asked for."""
        return self._backend

    @property
    def lowered(self) -> Lowered:
        """The program as backends get it."""
        return self._lowered

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        q_index: torch.Tensor | None = None,
        kv_index: torch.Tensor | None = None,
        deterministic: bool | None = None,
        seed: int | None = None,
        **captures: torch.Tensor | Scalar,
    ) -> Any:
        """Attention of ``q`` over ``k`` and ``v``.

        Args:
            q: (B, Hq, Lq, D), fp16, bf16, fp32, or fp64 where the backend has it.
            k: (B, Hkv, Lk, D); Hq is a multiple of Hkv. Any strides; a last stride other than 1
                is copied.
            v: (B, Hkv, Lk, Dv).
            scale: Factor of ``q . k`` in the raw score; 1 / sqrt(D) by default.
            return_lse: Whether to return the log-sum-exp of each row too.
            q_offset: Logical position of the first query: an int or a 0-d int tensor.
            kv_offset: The same of the first key.
            q_index: (Lq,) ints, the logical position of each query; replaces the offset.
            kv_index: (Lk,) ints, the same of each key.
            deterministic: Whether gradients must be equal bit for bit from run to run; by default
                what ``torch.use_deterministic_algorithms`` says.
            seed: Seed of dropout; drawn from torch's generator where the program has dropout and
                none is given.
            **captures: The program's tensors, and its run-time params as numbers or 0-d tensors.

        Returns:
            out (B, Hq, Lq, Dv) in q's dtype; with ``return_lse`` also lse (B, Hq, Lq), natural
            logarithm, fp32 (fp64 for fp64), differentiable. A row with no live pair has out 0 and
            lse -inf.

        Raises:
            ShapeError: Sizes that do not go together.
            DTypeError: dtypes that do not, or that cannot be used.
            DeviceError: Tensors on several devices.
            ArgumentError: Missing, unknown or unusable arguments.
            UnsupportedError: The backend cannot do what the program says.
            BackendError: The backend does not work here.
        """
        if self._defaults:
            captures = {**self._defaults, **captures}
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if seed is None:
            seed = self._draw_seed()
        if return_lse and self._lowered.program.weights is not None:
            raise UnsupportedError(
                "return_lse asks for a softmax's log-sum-exp, and the program has other weights",
                hint="drop return_lse",
            )
        if torch.compiler.is_compiling() or type(q) not in _PLAIN:
            call = bind(
                self._lowered.program, q, k, v, scale, captures, q_offset, kv_offset, q_index,
                kv_index, seed, deterministic,
            )  # fmt: skip
            out, lse = attend_in_graph(
                self._spec, self._lowered, self._backend, self._checked, call
            )
            return (out, lse) if return_lse else out
        key = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device, _kind(q_offset), _kind(kv_offset),
            _kind(q_index), _kind(kv_index), deterministic,
            *[(n, _kind(c)) for n, c in captures.items()],
        )  # fmt: skip
        prepared = self._prepared.get(key)
        if prepared is None:
            call = bind(
                self._lowered.program, q, k, v, scale, captures, q_offset, kv_offset, q_index,
                kv_index, seed, deterministic,
            )  # fmt: skip
            backend, _ = choose_backend(self._backend, q.device, self._checked)
            backend.check(self._lowered, call)
            if len(self._prepared) >= _MAX_SIGNATURES:
                self._prepared.clear()
            template = replace(
                call, q=q.new_empty(0), k=q.new_empty(0), v=q.new_empty(0), tensors={}, params={}
            )
            self._prepared[key] = backend, template
        else:
            backend, template = prepared
            program = self._lowered.program
            call = Call(
                rows_contiguous(q),
                rows_contiguous(k),
                rows_contiguous(v),
                template.scale if scale is None else scale,
                template.sizes,
                {decl.name: captures[decl.name] for decl in program.tensors},  # type: ignore[misc]
                {decl.name: captures.get(decl.name, decl.default) for decl in program.params},  # type: ignore[misc]
                q_offset,
                kv_offset,
                q_index,
                kv_index,
                seed,
                deterministic,
            )
        out, lse = attend(backend, self._lowered, call)
        return (out, lse) if return_lse else out

    def source(
        self,
        direction: str = "forward",
        *,
        head_dim: int = 64,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        **captures: torch.Tensor | Scalar,
    ) -> str:
        """Text of the generated kernels for calls of this kind; needs no GPU.

        Args:
            direction: ``forward`` or ``backward``.
            head_dim: Head dim of q and k.
            value_dim: Head dim of v; ``head_dim`` by default.
            dtype: dtype of q, k and v.
            **captures: Values of the program's tensors and params, where the defaults (fp32, int32
                and bool tensors; numbers) do not stand for what calls will pass.

        Raises:
            ArgumentError: ``direction`` is neither.
        """
        if direction not in ("forward", "backward"):
            raise ArgumentError(
                f"there is no direction {direction!r}", hint="use 'forward' or 'backward'"
            )
        from attndsl.backends.triton.cross import example_call, kernel_source

        call = example_call(
            self._lowered, head_dim, value_dim or head_dim, dtype, {**self._defaults, **captures}
        )
        learned = frozenset(n for n, t in call.tensors.items() if t.requires_grad)
        params = frozenset(
            n for n, p in call.params.items() if isinstance(p, torch.Tensor) and p.requires_grad
        )
        return kernel_source(self._lowered, call, direction, Wants(tensors=learned, params=params))

    def warmup(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **arguments: Any,
    ) -> None:
        """Generate and compile the kernels that a call with these arguments needs, by making it.

        With an input that requires grad, the backward's kernels too. Arguments are those of a call.
        """
        out = self(q, k, v, **arguments)
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            inputs = [
                x
                for x in (q, k, v, *self._defaults.values(), *arguments.values())
                if isinstance(x, torch.Tensor) and x.requires_grad
            ]
            torch.autograd.grad(out, inputs, torch.zeros_like(out), allow_unused=True)

    def explain(self, device: str | torch.device = "cpu") -> str:
        """What the program is to the compiler: its parts, its loops, and what would run it.

        Args:
            device: Where calls would run.
        """
        from attndsl.explain import explain

        return explain(self._lowered, self._backend, self._checked, torch.device(device))

    def _draw_seed(self) -> int:
        if self._lowered.program.dropout is None:
            return 0
        return int(torch.randint(0, 1 << 62, ()).item())

    def __repr__(self) -> str:
        line = " ".join(self._text.split())
        shown = line if len(line) <= 60 else line[:57] + "..."
        return f"Attention({shown!r}, backend={self._backend!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attention):
            return NotImplemented
        mine = (self._spec, self._backend, self._checked)
        return mine == (other._spec, other._backend, other._checked) and (
            self._defaults.keys() == other._defaults.keys()
            and all(t is other._defaults[n] for n, t in self._defaults.items())
        )

    def __hash__(self) -> int:
        return hash((self._spec, self._backend, self._checked))

    def __reduce__(self) -> tuple[Any, ...]:
        return Attention, (self._spec, self._text, self._backend, self._checked, self._defaults)


def _kind(value: object) -> object:
    """What validation looks at in a capture or an offset."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return type(value)
