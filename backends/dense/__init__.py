"""Attention over all pairs at once, in torch operations: what the IR means, the oracle of tests."""
