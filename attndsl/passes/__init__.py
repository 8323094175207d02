"""Passes over the IR, one a file; ``attndsl.pipeline`` says which runs when."""
