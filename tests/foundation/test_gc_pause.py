"""Work without looks for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from attndsl.foundation.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def as_before():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_it_is_as_before_whatever_happens():
    gc.enable()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled(), "the outer block goes on"
    assert gc.isenabled()
    with pytest.raises(ValueError, match="of this test"), gc_paused():
        raise ValueError("of this test")
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off():
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_no_import_of_the_package_looks_through_all_objects():
    code = """
import gc, torch
found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]))
import attndsl
attndsl.compile("causal()", backend="cpu")
assert attndsl.call.dispatch.get_backend("cpu")
assert 2 not in found, found
assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
