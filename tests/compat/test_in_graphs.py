"""``compile`` and ``trace`` of constants within graphs of ``torch.compile``."""

import pytest
import torch
from support.graph_errors import shown

import attndsl

LENGTH = 24
WINDOW = 5
DOC = torch.arange(LENGTH) // 7


def causal(b, h, q, kv):
    return q >= kv


def near(window):
    return lambda b, h, q, kv: (q >= kv) & (q - kv < window)


def rows(seed=0, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, length, 8, generator=generator, requires_grad=True)


def check(graphs, function, *more):
    """Values and gradients of a graph, and of the function itself."""
    graph, results = graphs(function), []
    for call in (graph, function):
        q = rows()
        out = call(q, *more)
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    return graph


def test_compile_within_a_graph(graphs):
    check(graphs, lambda q: attndsl.compile("causal()")(q, q, q))
    check(graphs, lambda q: attndsl.compile("q - kv < w", w=8, name="near")(q, q, q))
    check(graphs, lambda q: attndsl.compile("q - kv < w", params={"w": 8})(q, q, q))
    text = "tensor gain[heads]: float\nparam c: float = none\nscore = softcap(score, c)\n"
    text += "score = score * gain[h]"
    check(
        graphs,
        lambda q, gain: attndsl.compile(text, backend="cpu")(q, q, q, gain=gain, c=3.0),
        torch.tensor([0.5, 2.0]),
    )
    # A param that is called like an argument of the function stands in the mapping.
    check(graphs, lambda q: attndsl.compile("param text: int; q - kv < text",
                                              params={"text": 3})(q, q, q))  # fmt: skip
    assert graphs.counter.frame_count == 5


def test_a_graph_serves_all_lengths_and_each_text_has_its_own(graphs):
    function = graphs(lambda q, text: attndsl.compile(text)(q, q, q), dynamic=True)
    for text in ("causal()", "q - kv < 3", "causal()"):
        for length in (LENGTH, LENGTH + 5, 2 * LENGTH):
            q = rows(length=length)
            torch.testing.assert_close(function(q, text), attndsl.compile(text)(q, q, q))
    assert graphs.counter.frame_count == 2


def test_numbers_of_a_graph_are_guarded(graphs):
    function = graphs(lambda q, w: attndsl.compile("0 <= q - kv and q - kv < w", w=w)(q, q, q))
    for w in (3, 9, 4, 3):
        q = rows()
        expected = attndsl.compile("0 <= q - kv and q - kv < w", w=w)(q, q, q)
        torch.testing.assert_close(function(q, w), expected)


def traced(q, mask_mod):
    program = attndsl.trace(mask_mod=mask_mod)
    return attndsl.compile(program.text)(q, q, q, **program.captures)


def test_trace_within_a_graph(graphs):
    check(graphs, lambda q: traced(q, causal))
    check(graphs, lambda q: traced(q, lambda b, h, q, kv: (q >= kv) & (h > 0)))
    check(graphs, lambda q, n: traced(q, near(n)), 3)
    check(graphs, lambda q: traced(q, near(q.shape[2] // 2)))


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, kv: DOC[q] == DOC[kv],
        lambda b, h, q, kv: q - kv < WINDOW,
        lambda b, h, q, kv, window=3: q - kv < window,
    ],
    ids=["tensor", "global", "default"],
)
def test_functions_that_may_change_are_traced_before(graphs, mask_mod):
    # No guard would see that a name of a module means another value in a later run.
    with pytest.raises(Exception, match="trace it before the graph"):
        graphs(lambda q: traced(q, mask_mod))(rows())


FORWARD = True


def ahead(q, kv):
    return q >= kv


def changing():
    """Functions that read something, and what changes it."""
    width, past = 3, True

    def of_closure(b, h, q, kv):
        return (q >= kv if past else q <= kv) & (q - kv < width) & (kv - q < width)

    def set_closure():
        nonlocal width, past
        width, past = 6, False

    return {
        "module": (
            lambda b, h, q, kv: q >= kv if FORWARD else q <= kv,
            lambda patch: patch.setitem(globals(), "FORWARD", False),
        ),
        "function": (
            lambda b, h, q, kv: ahead(q, kv),
            lambda patch: patch.setitem(globals(), "ahead", lambda q, kv: q <= kv),
        ),
        "closure": (of_closure, lambda _: set_closure()),
    }


@pytest.mark.parametrize("name", list(changing()))
def test_a_graph_is_made_anew_if_what_a_traced_function_reads_changes(graphs, monkeypatch, name):
    mask_mod, change = changing()[name]
    function = graphs(lambda q: traced(q, mask_mod))
    q = rows()
    before = traced(q, mask_mod)
    torch.testing.assert_close(function(q), before)
    change(monkeypatch)
    after = traced(q, mask_mod)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(function(q), after)


def test_what_cannot_be_constant_is_refused(graphs):
    text = "tensor g[heads]: float\nscore = score * g[h]"
    words = "compile no program that keeps a tensor, and g is one"
    with pytest.raises(Exception, match=shown(words, "UnsupportedError")):
        graphs(lambda q: attndsl.compile(text, g=q[0, :, 0, 0])(q, q, q))(rows())
    with pytest.raises(Exception, match="'wrong' is not declared"):
        graphs(lambda q: attndsl.compile("mask = wrong")(q, q, q))(rows())


OPTIONAL = "tensor gain[heads]: float = none\nscore = score * gain[h]\nmask = {}"


def test_graphs_call_the_program_without_what_is_left_out(graphs):
    """Each program its own, although the same graph might be asked to serve it."""
    gain = torch.tensor([0.5, 2.0])
    programs = [
        attndsl.compile(OPTIONAL.format(mask), backend="cpu") for mask in ("causal()", "q - kv < 3")
    ]
    function = graphs(lambda program, q, gain: program(q, q, q, gain=gain))
    for program in (*programs, programs[0]):
        for given in (None, gain[:1]):
            results = []
            for call in (function, lambda program, q, gain: program(q, q, q, gain=gain)):
                q = rows()
                out = call(program, q, given)
                results.append((out, *torch.autograd.grad(out.square().sum(), q)))
            torch.testing.assert_close(*results)
    assert graphs.counter.frame_count == 4
