"""Support for editors: a lexer for Pygments, and a language server. Never imports torch.

All modules but :mod:`.language_server` are functions from text to facts, which need no library of
others.
"""
