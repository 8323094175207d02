"""Block sparsity: which tiles of the score matrix need work."""
