"""Programs and calls to look at: tiles, words, dense arrays, comparisons."""
