"""What torch's machinery is shown of calls: operators."""

from __future__ import annotations

import pytest
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
