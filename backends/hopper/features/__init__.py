"""Features that a Hopper kernel may have beside its loop: one module each.

Each says when kernels have it, and what they have for it: constants, device code, arguments, shared
memory. Their device code lies in ``templates/``.
"""
