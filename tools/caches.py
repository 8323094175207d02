"""Find the caches of the package, their bounds and their owners, and the doors among them.

A *cache* is one of these:

- a function under ``functools.cache`` or ``lru_cache``, as a decorator or as a call;
- a function under a decorator of ``OWNED``, or a call of a class of it: these register with one
  owner, and no other caches are in the module that defines them;
- a dict that begins empty, is an attribute of an object or a name of a module, and is keyed by
  more than a name, a number or a node: an attribute's annotation says so, its own or that of a base
  class. A dict with plain keys counts where it is emptied when full, and so does each of ``KNOWN``;
- a ``WeakKeyDictionary`` or a ``WeakValueDictionary`` in such a place;
- a class called ``...Cache``, if no cache was found within. ``OTHER`` lists those that are none.

Tables of one walk over a program (names to bindings, nodes to texts) are no caches by this rule.
``functools.cached_property`` and single attributes are none either.

The *idiom* of a cache says what it forgets, and when: ``lru_cache N``, ``once`` (``cache`` without
arguments), ``clear-all`` (when full), ``LRU``, ``stops`` (when full), ``weak``, ``owned`` or
``unbounded``.

A *door* is a place that remembers "a call of this signature was checked and dispatched": each of
``DOORS``, whose places of one letter count once, and any other dict or owned cache of ``attndsl/``
whose annotation says that it holds one of ``PREPARED``.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import TYPE_CHECKING, NamedTuple

from sources import Definition, Sources, children, module_of, parse, statements_of

if TYPE_CHECKING:
    from collections.abc import Iterator

OWNED = frozenset({"BoundedCache", "RecentEntries", "memoised"})
"""A class and a decorator whose caches register with one owner when they are made."""
KNOWN = frozenset({"Modules._modules", "Expressions._lines"})
"""Caches whose keys are names or nodes."""
OTHER = frozenset({"PagedCache"})
"""Classes called ``...Cache`` that hold keys and values of tokens."""
DOORS = {
    "Attention._prepared": "A",
    "PreparedCalls.cache": "A",
    "OtherLengths._kept": "B",
    "Attention._of_ones": "C",
    "Attention._variants": "D",
    "Attention._readied": "E",
    "Repeated._known": "F",
    "Job.known": "F",
    "Attention._steps": "G",
    "ServingPlan.layers": "H",
    "kept_calls": "I",
    "Sharded._known": "J",
    "ContextParallel._plans": "K",
    "Signature.steps": "L",
}
"""Doors by the letters that they have in the issue of the one prepared call."""
PREPARED = frozenset(
    {"Prepared", "PreparedCall", "PreparedStep", "Ready", "CheckedCall", "Known", "KnownBackward"}
)
"""Classes of what a door keeps."""

_MAY_HOLD = re.compile(r"[cC]ache|\{\}|[dD]ict\b|Weak")
_DICTS = frozenset({"dict", "OrderedDict", "defaultdict"})
_WEAK = frozenset({"WeakKeyDictionary", "WeakValueDictionary"})
_DICT_TYPE = re.compile(r"(\w*\.)?(dict|OrderedDict|defaultdict)\[")
_DECLARED = re.compile(rf"{_DICT_TYPE.pattern}|({'|'.join(OWNED)})\[")
_PLAIN = r"(str|int|Node|ast\.\w+)"
_PLAIN_KEY = re.compile(
    # Without values it is a set in an order.
    rf"{_DICT_TYPE.pattern}({_PLAIN}|tuple\[{_PLAIN}(, {_PLAIN})*\]),|.*, None\]$"
)


class Cache(NamedTuple):
    """A cache, and what it forgets when."""

    module: str
    name: str
    idiom: str
    line: int
    holds: str = ""
    """The annotation, where there is one."""

    @property
    def is_owned(self) -> bool:
        """True if the owner of caches knows it."""
        return self.idiom == "owned"


def caches(sources: Sources) -> list[Cache]:
    """All caches, in the order of their files."""
    declared = _declared(sources)
    found = []
    for path, text in sources.items():
        if _MAY_HOLD.search(text):
            found += sorted(_caches_of(path, sources, declared), key=lambda cache: cache.line)
    return found


def doors(sources: Sources, found: list[Cache]) -> list[str]:
    """All doors, one a letter or a place, where ``found`` are the :func:`caches`."""
    places = _places(sources)
    letters: dict[str, list[str]] = {}
    for name, letter in DOORS.items():
        if name in places:
            letters.setdefault(letter, []).append(f"{places[name]}: {name}")
    if "PreparedCalls.cache" in places:
        # It is found before the program of a call is looked for, and A is its place.
        del letters["D"]
        letters["A"] = [name for name in letters["A"] if "PreparedCalls" in name]
    own = [f"{letter} {', '.join(names)}" for letter, names in letters.items()]
    others = [
        f"- {cache.module}: {cache.name}"
        for cache in found
        if cache.name not in DOORS
        and cache.idiom not in ("once", "weak")
        and not cache.idiom.startswith("lru_cache")
        and not cache.module.startswith("attndsl.backends.")
        and PREPARED & set(re.findall(r"\w+", cache.holds))
    ]
    return own + others


def _caches_of(
    path: str, sources: Sources, declared: dict[str, tuple[str, str]]
) -> Iterator[Cache]:
    module, text = module_of(path), sources[path]
    if any(f"{kind} {name}" in text for kind in ("class", "def") for name in OWNED):
        return
    for name, call, function in _functions(text):
        idiom = _idiom_of_function(call, function)
        returned = ast.unparse(function.returns) if function and function.returns else ""
        yield Cache(module, name, idiom, call.lineno, returned)
    named = set()
    for scope in statements_of(text):
        if not isinstance(scope, ast.Module | ast.ClassDef):
            continue
        prefix = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
        empty = False
        for attribute, kind, annotation, line in _attributes(scope):
            base, base_holds = declared.get(attribute, ("", ""))
            holds, name = annotation or base_holds, prefix + attribute
            if kind in OWNED:
                idiom = "owned"
                named.add(line)
            elif kind in _WEAK:
                idiom = "weak"
            else:
                idiom = _idiom_of_dict(attribute, text)
                if idiom == "unbounded" and base:
                    idiom = _idiom_of_dict(attribute, sources[base])
                keyed = _DICT_TYPE.match(holds) and not _PLAIN_KEY.match(holds)
                bounded = idiom == "clear-all" or (idiom == "LRU" and kind == "OrderedDict")
                if not (keyed or bounded or not prefix or name in KNOWN):
                    continue
            empty = True
            yield Cache(module, name, idiom, line, holds)
        is_class = prefix.endswith("Cache.") and prefix[:-1] not in OTHER
        if is_class and not empty and not any("Protocol" in ast.unparse(b) for b in scope.bases):
            yield Cache(module, prefix[:-1], "class", scope.lineno)
    for name, line in _owned(text):
        if line not in named:
            yield Cache(module, name, "owned", line)


def _owned(text: str) -> Iterator[tuple[str, int]]:
    """Calls of classes of ``OWNED``: the first argument, which is a name, and the line."""
    classes = {name for name in OWNED if _is_class(name) and name in text}
    for node in ast.walk(parse(text)) if classes else ():
        if isinstance(node, ast.Call) and _last_name(node.func) in classes:
            yield ast.unparse(node.args[0]) if node.args else "?", node.lineno


def _functions(text: str) -> Iterator[tuple[str, ast.expr, Definition | None]]:
    """Names of functions under caches, the decorator or the call, and the function itself."""
    for node in statements_of(text):
        if isinstance(node, Definition):
            for decorator in node.decorator_list:
                if _keeps_results(decorator):
                    yield node.name, decorator, node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            # As cache(function), lru_cache(function) and lru_cache(64)(function).
            function = node.value.func
            if node.value.args and _keeps_results(function):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                yield ast.unparse(target), function, None


def _keeps_results(node: ast.expr) -> bool:
    name = _last_name(node.func if isinstance(node, ast.Call) else node)
    return name in ("cache", "lru_cache") or (name in OWNED and not _is_class(name))


def _is_class(name: str) -> bool:
    return name[:1].isupper()


def _idiom_of_function(call: ast.expr, function: Definition | None) -> str:
    text = ast.unparse(call)
    if _last_name(call.func if isinstance(call, ast.Call) else call) in OWNED:
        return "owned"
    if "lru_cache" in text:
        bound = re.search(r"\((?:maxsize=)?([\w.]+)\)", text)
        if bound is None or bound[1] != "None":
            return f"lru_cache {bound[1] if bound else 128}"
    has_arguments = function is None or bool(ast.unparse(function.args))
    return "unbounded" if has_arguments else "once"


def _attributes(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str, str, int]]:
    """Name, class, annotation and line of each dict or cache of ``scope`` that begins empty."""
    seen = set()
    for node in _statements(scope):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        kind = _kind(node.value)
        if kind is None:
            continue
        if isinstance(target, ast.Name) and node in scope.body:
            name = target.id
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            name = target.attr
        else:
            continue
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        if name not in seen:
            seen.add(name)
            yield name, kind, annotation, node.lineno


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """All within ``scope``, but not within classes in it."""
    for child in children(scope):
        if not isinstance(child, ast.ClassDef):
            yield child
            yield from _statements(child)


def _kind(value: ast.expr) -> str | None:
    """The class of an empty dict or of a cache that ``value`` makes."""
    if isinstance(value, ast.Dict):
        return None if value.keys else "dict"
    if not isinstance(value, ast.Call):
        return None
    name = _last_name(value.func)
    if name == "field":
        made = [each.value for each in value.keywords if each.arg == "default_factory"]
        if not made:
            return None
        if isinstance(made[0], ast.Lambda):
            return _kind(made[0].body)
        value, name = made[0], _last_name(made[0])
    elif name in _DICTS and value.args:
        return None
    return name if name in _DICTS | _WEAK | OWNED else None


def _last_name(node: ast.expr) -> str:
    """The last name of ``a.b``, ``a.b[c]``, and of the first argument of ``partial(a.b, ...)``."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Call) and node.args and _last_name(node.func) == "partial":
        return _last_name(node.args[0])
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class _Uses(NamedTuple):
    """What one function does with whatever it names."""

    name: str
    parameters: list[str]
    aliases: list[tuple[str, set[str]]]
    """Local names, and the names of what they may be."""
    calls: list[tuple[str, str]]
    """Names whose methods are called, and the methods."""
    compared: set[str]
    """Names whose length is compared."""
    passed: list[tuple[str, int, str]]
    """Functions, the place of an argument, and its name."""


@functools.cache
def _uses_in(text: str) -> list[_Uses]:
    return [_uses_of(node) for node in statements_of(text) if isinstance(node, Definition)]


def _uses_of(function: Definition) -> _Uses:
    parameters = [each.arg for each in function.args.args if each.arg != "self"]
    uses = _Uses(function.name, parameters, [], [], set(), [])
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.NamedExpr):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                uses.aliases.append((target.id, _ends(node.value)))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                uses.calls.append((_last_name(node.func.value), node.func.attr))
            for place, argument in enumerate(node.args):
                uses.passed.append((_last_name(node.func), place, _last_name(argument)))
        elif isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                if isinstance(part, ast.Call) and _last_name(part.func) == "len":
                    uses.compared.add(_last_name(part.args[0]))
    return uses


def _idiom_of_dict(attribute: str, text: str) -> str:
    """How the functions of one module bound a dict."""
    functions = _uses_in(text)
    passed = {
        (function, place)
        for uses in functions
        for function, place, name in uses.passed
        if name == attribute
    }
    stops = False
    for uses in functions:
        names = {attribute, *(name for name, ends in uses.aliases if attribute in ends)}
        names |= {n for i, n in enumerate(uses.parameters) if (uses.name, i) in passed}
        methods = {method for name, method in uses.calls if name in names}
        if names & uses.compared and "clear" in methods:
            return "clear-all"
        if methods & {"popitem", "move_to_end"}:
            return "LRU"
        stops |= bool(names & uses.compared)
    return "stops" if stops else "unbounded"


def _ends(value: ast.expr) -> set[str]:
    """Last names of what ``value`` may be."""
    if isinstance(value, ast.IfExp):
        return _ends(value.body) | _ends(value.orelse)
    return {_last_name(value)} if isinstance(value, ast.Name | ast.Attribute) else set()


def _declared(sources: Sources) -> dict[str, tuple[str, str]]:
    """Dicts that classes declare for the classes that make them: file and annotation."""
    found = {}
    for path, text in sources.items():
        if not _MAY_HOLD.search(text):
            continue
        for scope in statements_of(text):
            if isinstance(scope, ast.ClassDef):
                for node in scope.body:
                    if isinstance(node, ast.AnnAssign) and node.value is None:
                        annotation = ast.unparse(node.annotation)
                        if _DECLARED.match(annotation):
                            found[ast.unparse(node.target)] = (path, annotation)
    return found


def _places(sources: Sources) -> dict[str, str]:
    """Modules of all functions, and of all attributes behind the name of their class."""
    found = {}
    for path, text in sources.items():
        for scope in statements_of(text):
            if isinstance(scope, Definition):
                found[scope.name] = module_of(path)
            elif isinstance(scope, ast.ClassDef):
                for node in _statements(scope):
                    if isinstance(node, ast.Assign | ast.AnnAssign):
                        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                        found[f"{scope.name}.{_last_name(target)}"] = module_of(path)
    return found
