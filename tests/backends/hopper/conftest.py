"""What tests of Hopper's host code share."""

from __future__ import annotations

import pytest
from support.hopper_launches import CFunctions, remembering


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> CFunctions:
    """The installed Triton's launcher, on top of C functions that only remember."""
    return remembering(monkeypatch)
