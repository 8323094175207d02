"""Arguments, dispatch, autograd and the kernel cache: what happens at a call."""
