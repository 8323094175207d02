"""A relaxed mask holds wherever the mask may hold, and mentions nothing that is not known."""

from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.ir import DType, Op, const, load, node, param, reads_score, toposort, var
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.tiles.mask_bounds import relaxed

Q, KV = var("q"), var("kv")
KNOWN = (node(Op.LT, KV, Q), node(Op.EQ, Q, KV), node(Op.LT, Q, param("near", DType.INT)))
HIDDEN = (
    node(Op.EQ, load("doc", DType.INT, Q), load("doc", DType.INT, KV)),
    node(Op.LT, KV, param("far", DType.INT)),
)


def _joined(inner):
    pairs = st.tuples(st.sampled_from((Op.AND, Op.OR)), inner, inner)
    return st.one_of(
        pairs.map(lambda x: node(*x)),
        inner.map(lambda x: node(Op.NOT, x)),
        st.tuples(inner, inner, inner).map(lambda x: node(Op.WHERE, *x)),
        st.tuples(inner, inner).map(lambda x: node(Op.EQ, *x)),
    )


@settings(deadline=None, max_examples=60)
@given(st.recursive(st.sampled_from(KNOWN + HIDDEN), _joined, max_leaves=8), st.randoms())
def test_no_pair_is_lost(mask, random):
    found = relaxed(mask, {"far"})
    assert not any(
        item.op is Op.LOAD or (item.op is Op.PARAM and item.value == "far")
        for item in toposort(found)
    )
    for _ in range(20):
        doc = [random.randint(0, 2) for _ in range(6)]
        names = {"q": random.randint(0, 5), "kv": random.randint(0, 5), "near": 3, "far": 2}
        known = Environment(names, lambda name, at: doc[at[0]])  # noqa: B023
        if evaluate(mask, known):
            assert evaluate(found, known)


@settings(deadline=None, max_examples=60)
@given(st.recursive(st.sampled_from(KNOWN), _joined, max_leaves=6))
def test_what_is_known_stays(mask):
    found = relaxed(mask, {"far"})
    for q, kv in ((0, 0), (1, 4), (5, 2)):
        known = Environment({"q": q, "kv": kv, "near": 3})
        assert evaluate(found, known) == evaluate(mask, known)


def test_conditions_of_documents_leave_the_others():
    program = attndsl.compile(
        "tensor doc[batch, kv_len]: int\nmask = causal() and not (doc[b, q] != doc[b, kv])"
    ).lowered.program
    assert relaxed(program.mask, ()) is attndsl.compile("causal()").lowered.program.mask
    scores = attndsl.compile("mask = score > 0.5").lowered.program
    assert reads_score(scores.mask)
    assert relaxed(scores.mask, ()) is const(True)
