"""What torch's machinery is shown of calls: operators, graphs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Keeps the calls of attndsl's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.others = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "attndsl":
            self.calls.append((function, args))
        else:
            self.others.append(function)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def graphs():
    """``graphs(function, dynamic=...)`` compiles without breaks; ``graphs.frame_count`` counts."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def make(function, backend=counter, **options):
        return torch.compile(function, backend=backend, fullgraph=True, **options)

    make.counter = counter
    yield make
    torch._dynamo.reset()
