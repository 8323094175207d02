"""Type checkers know what calls return."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_overloads

import pytest

import attndsl
from attndsl.flex import flex_attention

PACKAGE = Path(attndsl.__file__).parent
SHOWN = (
    "__init__.py", "py.typed", "api.py", "attention.py", "errors.py", "call/lse_merge.py",
    "flex/__init__.py", "flex/flex_call.py", "torch_api/__init__.py", "torch_api/sdpa.py",
)  # fmt: skip
"""What mypy reads: it takes long with all of the package, and half a minute with torch."""
TORCH = "class Tensor: ...\nclass dtype: ...\nclass device: ...\n"
PAIR = "tuple[torch.Tensor, torch.Tensor]"
REVEALED = {
    "attn(q, q, q)": "torch.Tensor",
    "attn(q, q, q, gain=q, window=8)": "torch.Tensor",
    "attn(q, q, q, return_lse=False, scale=0.1)": "torch.Tensor",
    "attn(q, q, q, return_lse=True, captures={'gain': q})": PAIR,
    "attn(q, q, q, return_lse=bool(1))": f"torch.Tensor | {PAIR}",
    "attndsl.compile('causal()')(q, q, q)": "torch.Tensor",
    "attndsl.load('a.yaml')['local'](q, q, q, return_lse=True)": PAIR,
    "attndsl.merge([attn(q, q, q, return_lse=True)])": PAIR,
    "attndsl.scaled_dot_product_attention(q, q, q)": "torch.Tensor",
    "attndsl.flex.flex_attention(q, q, q)": "torch.Tensor",
    "attndsl.flex.flex_attention(q, q, q, return_lse=True)": PAIR,
    "attndsl.flex.flex_attention(q, q, q, return_aux=attndsl.flex.AuxRequest(lse=True))": (
        "tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None, "
        "fallback=attndsl.flex.flex_call.AuxOutput]]"
    ),
}
REFUSED = {
    "attn(q, q)": "call-overload",
    "attn(q, q, q, return_lse=3)": "call-overload",
    "attndsl.compil('causal()')": "attr-defined",
    "attndsl.errors.ShapError": "attr-defined",
    "attndsl.flex.flex_atention": "attr-defined",
}


def test_mypy_knows_what_calls_return(tmp_path):
    for name in SHOWN:
        (tmp_path / "attndsl" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / "attndsl" / name)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    head = ["import attndsl, torch", "from attndsl.attention import Attention"]
    head += ["def user(attn: Attention, q: torch.Tensor) -> None:"]
    lines = [f"    reveal_type({call})" for call in REVEALED] + [f"    {call}" for call in REFUSED]
    (tmp_path / "user.py").write_text("\n".join([*head, *lines]) + "\n")
    command = [
        sys.executable, "-P", "-m", "mypy", "--ignore-missing-imports", "--no-site-packages",
        "--cache-dir", str(tmp_path / "cache"), "user.py",
    ]  # fmt: skip
    ran = subprocess.run(
        command, cwd=tmp_path, timeout=300, capture_output=True, text=True, check=False
    )
    said = {}
    for line in ran.stdout.splitlines():
        place, _, message = line.partition(": ")
        file, _, number = place.partition(":")
        if file == "user.py" and not message.startswith("note: Possible"):
            said.setdefault(int(number), message)
    first = len(head) + 1
    for number, (call, kind) in enumerate(REVEALED.items(), first):
        assert said.get(number) == f'note: Revealed type is "{kind}"', (call, ran.stdout)
    for number, (call, code) in enumerate(REFUSED.items(), first + len(REVEALED)):
        assert said.get(number, "").endswith(f"[{code}]"), (call, ran.stdout)


@pytest.mark.parametrize("function", [attndsl.Attention.__call__, flex_attention])
def test_overloads_are_the_function_itself(function):
    """What each says of its arguments, but for those that decide what is returned."""
    own = {
        name: (parameter.annotation, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("return_lse", "return_aux")
    }
    overloads = get_overloads(function)
    assert len(overloads) > 2
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        found = {
            name: (parameter.annotation, parameter.default)
            for name, parameter in parameters.items()
            if name not in ("return_lse", "return_aux")
        }
        assert found == own
        assert parameters.keys() == inspect.signature(function).parameters.keys()
