"""Write docs/api/*.md from the docstrings of the public names.

python docs/api_pages.py

Each name gets a heading, its signature, the first paragraph of its docstring, and a line for each
argument, field, result and error.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FOLDER = Path(__file__).parent / "api"
MOST_WORDS, MOST_WORDS_OF_A_PAGE = 6000, 3500
_PROJECT = "attndsl"
_WIDTH = 96
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([\w.]+)`")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Warns|Example|Examples):$")
_ENTRY = re.compile(r"^(\*{0,2}\w[\w, ]*): (.*)$")
_END = re.compile(r"(?<!e\.g)(?<!i\.e)[.!?](?= +[A-Z`(\[\"])")


_CHOICE = re.compile(r" +`\w+`: ")
"""The next one of the values that an argument may have."""
_IS_KEPT = re.compile(r"default|None|^(or )?`")
"""Later clauses of a long sentence that are not left out."""


class Page(NamedTuple):
    """A page: what it says of itself, and the names on it."""

    title: str
    about: str
    names: tuple[str, ...]
    end: str = ""


class Described:
    """Arguments that a page has described, and where."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], str] = {}

    def lines(self, place: str, entries: Sequence[tuple[str, str]]) -> list[str]:
        """Lines on the arguments of ``place``; one line for all that another place describes."""
        own, others = dict[str, list[str]](), dict[str, list[str]]()
        first = place
        for name, text in entries:
            is_same = name in OF_CALLS or _AS_OF_A_CALL.match(text)
            if is_same and _LIKE_CALLS.match(place):
                first = A_CALL
            elif not _OF_THE_LAST.match(text):
                first = self._places.setdefault((name, text), place)
            elif not text.startswith("The same."):
                first = place
            if first == place:
                own.setdefault(text, []).append(f"`{name}`")
            else:
                others.setdefault(f"see `{first}`.", []).append(f"`{name}`")
        return [
            line
            for told in (own, others)
            for text, names in told.items()
            for line in _wrapped(f"- {', '.join(names)}: {text}", "  ")
        ]


class Parts(NamedTuple):
    """The parts of a docstring that pages have."""

    first: str
    """Its first paragraph."""
    sections: Mapping[str, tuple[tuple[str, str], ...]]
    """Entries of each section: a name, empty where there is none, and its text."""


PAGES = {
    "programs": Page(
        "Programs",
        "These functions create, combine and check programs.",
        tuple(
            f"attndsl.{name}"
            for name in ("compile", "load", "join", "tensor", "compare", "verify", "merge", "trace")
        ),
    ),
    "attention": Page(
        "Attention",
        "`attndsl.compile` returns an `Attention`, and `attndsl.load` returns several. Their "
        "methods return most of the other classes on this page.",
        (
            *(
                f"attndsl.{name}"
                for name in ("Attention", "PagedCache", "ServingPlan", "Gradients", "TileMap")
            ),
            "attndsl.inspection.kv_retention.Retained",
            "attndsl.inspection.call_inputs.Param",
            "attndsl.inspection.call_inputs.Tensor",
        ),
    ),
    "torch": Page(
        "PyTorch attention",
        "These functions and modules accept the arguments of PyTorch's attention. For examples, "
        "see [Migration](../migration.md).",
        (
            "attndsl.scaled_dot_product_attention",
            "attndsl.nn.MultiheadAttention",
            "attndsl.layout.pad_strides",
        ),
    ),
    "flex": Page(
        "FlexAttention names",
        "`attndsl.flex` provides the names in `torch.nn.attention.flex_attention`. For examples, "
        "see [Coming from FlexAttention](../flex.md).",
        tuple(
            f"attndsl.flex.{name}"
            for name in ("flex_attention", "create_block_mask", "BlockMask", "Trace")
        ),
        "`AuxRequest`, `AuxOutput`, `and_masks`, `or_masks`, `noop_mask`, `create_mask` and "
        "`FlexKernelOptions` match PyTorch's.",
    ),
    "huggingface": Page(
        "Hugging Face models",
        "`attndsl.hf` requires the extra `hf`. See [Hugging Face](../huggingface.md) for examples.",
        ("attndsl.hf.register",),
    ),
    "compat": Page(
        "Other libraries",
        "`attndsl.compat` provides functions with the signatures of flash-attn 2.8 and xFormers. "
        "For examples, see [Migration](../migration.md).",
        tuple(
            f"attndsl.compat.{name}"
            for name in (
                "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
                "memory_efficient_attention", "BlockDiagonalMask", "BlockDiagonalPaddedKeysMask",
            )
        ),
        "These biases also work, with the same meaning as in xFormers: "
        "`LowerTriangularMask`, `LowerTriangularMaskWithTensorBias`, "
        "`LowerTriangularFromBottomRightMask`, "
        "`LowerTriangularFromBottomRightLocalAttentionMask`, "
        "`LocalAttentionFromBottomRightMask`, `BlockDiagonalCausalMask`, "
        "`BlockDiagonalCausalFromBottomRightMask`, `BlockDiagonalCausalLocalAttentionMask`, "
        "`BlockDiagonalCausalLocalAttentionFromBottomRightMask` and "
        "`BlockDiagonalCausalWithOffsetPaddedKeysMask`.",
    ),
    "parallel": Page(
        "Several GPUs",
        "These classes split one sequence over many ranks. For examples, see [Scale](../scale.md).",
        tuple(
            f"attndsl.parallel.{name}"
            for name in ("ContextParallel", "Sharded", "Shape", "Machine")
        ),
    ),
    "errors": Page(
        "Errors",
        "Every error is an `AttnDSLError`, a subclass of `ValueError`.",
        ("attndsl.errors",),
    ),
}  # fmt: skip
"""All pages by the stems of their files. A module stands for the classes that it defines."""
MADE = frozenset(
    ("Attention", "ServingPlan", "TileMap", "Gradients", "Retained", "Param", "Tensor", "Trace",
     "Sharded", "BlockMask", "BlockDiagonalMask", "BlockDiagonalPaddedKeysMask")
)  # fmt: skip
"""Classes whose objects calls return: pages leave out their constructors."""

OF_CALLS = frozenset(
    ("scale", "seed", "deterministic", "out_dtype", "return_lse", "q_offset", "kv_offset",
     "q_index", "kv_index", "whole_sizes", "h_offset", "b_offset", "kv_lengths", "captures",
     "tiles", "**names", "**named", "**given", "**arguments")
)  # fmt: skip
"""Arguments that other functions share with a call of a program."""
A_CALL = "Attention.__call__"
_LIKE_CALLS = re.compile(r"Attention\.(?!__call__)|(verify|compare|Sharded\.\w+)$")
_AS_OF_A_CALL = re.compile(r"(As (of|for) (a|the) call|\(B, Hkv, Lk, Dv?\))")
_OF_THE_LAST = re.compile(r"The same|That of|Query heads, likewise|Which .*likewise")
"""Texts that mean nothing away from the argument before."""
HIDDEN = re.compile(
    # For other parts of the package.
    r"Attention\.(variant|call_of_lengths|call_of_mask|lowered|made_of)$"
    r"|ContextParallel\.(now|plan_for|is_planned|key_of|refuse|group|reduces|exchange)$"
    r"|ServingPlan\.|Sharded\.gradients$|Trace\.(lengths_used|makes|numbers|stable)$"
    # As in PyTorch and xFormers.
    r"|MultiheadAttention\.forward$|BlockMask\.|BlockDiagonal\w+\."
)
"""Members that pages leave out."""
_LONG_SENTENCE = 16
"""Words of a sentence from which on only some of its clauses are shown."""


def page(stem: str) -> str:
    """The text of a page."""
    own, described = PAGES[stem], Described()
    lines = [f"# {own.title}", "", *_wrapped(own.about), ""]
    for name in names_of(own):
        lines += _entry(name, described)
    if own.end:
        lines += [*_wrapped(own.end), ""]
    return "\n".join(lines).rstrip() + "\n"


def names_of(own: Page) -> list[str]:
    """The names on a page, those of the classes of a module instead of the module's."""
    found = []
    for name in own.names:
        value = _value(name)
        if inspect.ismodule(value):
            tree = ast.parse(inspect.getsource(value))
            found += [f"{name}.{x.name}" for x in tree.body if isinstance(x, ast.ClassDef)]
        else:
            found.append(name)
    return found


def parts_of(docstring: str) -> Parts:
    """The first paragraph and the sections of a docstring of Google's style."""
    text = plain(inspect.cleandoc(docstring))
    first = " ".join(text.partition("\n\n")[0].split())
    sections: dict[str, list[tuple[str, str]]] = {}
    entries: list[tuple[str, str]] | None = None
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section is not None:
            entries = sections.setdefault(section[1], [])
        elif line and not line.startswith(" "):
            entries = None
        elif entries is not None and line.strip():
            _add(entries, line, named=section_has_names(sections))
    return Parts(first, {name: tuple(found) for name, found in sections.items()})


def section_has_names(sections: Mapping[str, object]) -> bool:
    """True if the entries of the last section begin with names."""
    return next(reversed(sections)) not in ("Returns", "Yields")


def _add(entries: list[tuple[str, str]], line: str, named: bool) -> None:
    """Add a line of a section: a new entry, or more of the last one."""
    entry = _ENTRY.match(line[4:]) if named else None
    if entry is not None:
        entries.append((entry[1], entry[2]))
    elif entries:
        name, text = entries[-1]
        entries[-1] = name, f"{text} {line.strip()}"
    else:
        entries.append(("", line.strip()))


def plain(text: str) -> str:
    """``text`` in Markdown: roles and literals in single backticks."""
    named = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    return named.replace("``", "`")


def sentence(text: str) -> str:
    """The first sentence of ``text``; of a long one, the first clause and those on values."""
    end = next((x for x in _END.finditer(text) if not _CHOICE.match(text, x.end())), None)
    text = text if end is None else text[: end.start() + 1]
    first, *others = text.removesuffix(".").split("; ")
    if len(text.split()) < _LONG_SENTENCE or not others or "(" in first.rpartition(")")[2]:
        return text
    return "; ".join([first, *filter(_IS_KEPT.search, others)]) + "."


def signature(name: str, value: Any) -> str:
    """A call of ``value`` with its parameters and their defaults, in lines that are not long.

    Those that share arguments with a call leave these out.
    """
    given = inspect.signature(value)
    is_short = _LIKE_CALLS.match(name) is not None
    own = [
        each.replace(annotation=each.empty)
        for each in given.parameters.values()
        if each.name not in ("self", "cls") and not (is_short and each.name in OF_CALLS)
    ]
    short = given.replace(parameters=own, return_annotation=given.empty)
    text = re.sub(r"<(?:function|class) '?(\w+)[^>]*>", r"\1", f"{name}{short}")
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False))


def _entry(name: str, described: Described) -> list[str]:
    """A public name of a page."""
    value, last = _value(name), name.rpartition(".")[2]
    lines = [f"## `{name}`", ""]
    if not inspect.isclass(value):
        return lines + _about(last, value, described)
    is_shown = last not in MADE and not issubclass(value, Exception)
    lines += _about(last, value, described, is_shown)
    for member, found in _members(value):
        if not HIDDEN.match(f"{last}.{member}"):
            lines += [f"### `{last}.{member}`", ""]
            lines += _about(f"{last}.{member}", found, described)
    return lines


def _about(name: str, value: Any, described: Described, has_signature: bool = True) -> list[str]:
    """The signature of what is called ``name``, and the parts of its docstring."""
    parts = parts_of(inspect.getdoc(value) or "")
    call = signature(name, value) if has_signature else ""
    lines = ["```text", call, "```", ""] if not call.endswith("()") and call else []
    lines += [*_wrapped(parts.first), ""]
    entries = dict([*parts.sections.get("Args", ()), *parts.sections.get("Attributes", ())])
    for field, text in _fields(value) if inspect.isclass(value) else ():
        if not HIDDEN.match(f"{name}.{field}"):
            entries.setdefault(field, text)
    shown = {each: sentence(text) for each, text in entries.items()}
    if shown:
        lines += [*described.lines(name, list(shown.items())), ""]
    for section in ("Returns", "Yields", "Raises", "Warns"):
        if section in parts.sections:
            lines += [*_wrapped(_in_one_line(section, parts.sections[section])), ""]
    return lines


def _in_one_line(section: str, entries: tuple[tuple[str, str], ...]) -> str:
    """Results, or the names of errors."""
    if section in ("Returns", "Yields"):
        return f"**{section}** {sentence(entries[0][1])}"
    names = [f"`{name}`" for each, _ in entries for name in each.split(", ") if name]
    return f"**{section}** {', '.join(names) or sentence(entries[0][1])}"


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Methods of a class and of its bases in the project, in the order of the source."""
    seen = set()
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] != _PROJECT:
            continue
        for name, raw in vars(base).items():
            value = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
            is_public = not name.startswith("_") or (name == "__call__" and owner is base)
            if is_public and inspect.isfunction(value) and name not in seen and value.__doc__:
                seen.add(name)
                yield name, value


def _fields(owner: type) -> Iterator[tuple[str, str]]:
    """Documented attributes and properties of a class and of its bases, and their docstrings."""
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] != _PROJECT:
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        before: ast.stmt | None = None
        for each in node.body:
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                name = before.target.id
                if not name.startswith("_") and (text := _string(each)) is not None:
                    yield name, _paragraph(text)
            before = each
        for name, value in vars(base).items():
            if isinstance(value, property | functools.cached_property) and name[0] != "_":
                yield name, _paragraph(value.__doc__ or "")


def _string(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        value = node.value.value
        return value if isinstance(value, str) else None
    return None


def _paragraph(text: str) -> str:
    return parts_of(text).first


def _value(name: str) -> Any:
    """What a dotted name leads to."""
    try:
        return resolve_name(name)
    except AttributeError:
        module, _, last = name.rpartition(".")
        return resolve_name(f"{module}:{last}")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    """Write all pages."""
    for stem in PAGES:
        (FOLDER / f"{stem}.md").write_text(page(stem), "utf-8")


if __name__ == "__main__":
    main()
