"""Conditions of functions: what is known of one goes into no program."""

import pytest

from attndsl.flex.arithmetic import FALSE, TRUE, bitwise, both, compare, either, negation
from attndsl.ir import Op, var

SOME = compare("<", var("q"), 3)


@pytest.mark.parametrize(
    ("join", "op", "neutral", "decisive"),
    [(both, Op.BITAND, TRUE, FALSE), (either, Op.BITOR, FALSE, TRUE)],
)
def test_conditions_that_are_known_are_left_out(join, op, neutral, decisive):
    for found in (join, lambda a, b: bitwise(op, a, b)):
        for one in (TRUE, FALSE, SOME):
            assert found(neutral, one) is found(one, neutral) is one
            assert found(decisive, one) is found(one, decisive) is decisive
    assert join(SOME, negation(SOME)).args == (SOME, negation(SOME))


def test_what_is_known_is_negated_at_once():
    assert negation(FALSE) is TRUE
    assert negation(TRUE) is FALSE
    assert negation(SOME).args == (SOME,)
