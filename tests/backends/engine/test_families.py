"""The families that a backend's name allows."""

from __future__ import annotations

import pytest

from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.engine.families import (
    FAMILIES,
    GENERATED,
    HOPPER,
    families_of,
    make_families,
    name_of,
)
from attndsl.runtime.program_store import default_cache


def test_entries_name_their_families():
    names = tuple(entry.name for entry in FAMILIES)
    families, pages = make_families(names)
    assert tuple(family.name for family in families) == names
    assert pages.name == "decode"
    assert set(GENERATED) == set(names)


@pytest.mark.parametrize("name", GENERATED)
def test_a_name_allows_its_family_and_the_portable_one(name):
    allowed = families_of(name)
    assert set(allowed) == {name, "triton"}
    assert allowed[0] == name
    assert generated_backend(allowed, default_cache()).name == name


def test_auto_allows_what_is_best_on_a_gpu():
    assert families_of("auto", HOPPER) == ("short", "decode", "hopper", "triton")
    for other in (None, "cuda:80", "cuda:100"):
        assert families_of("auto", other) == ("triton",)
    assert name_of(families_of("auto", HOPPER)) == "auto"


def test_decode_leaves_many_rows_to_hoppers_kernels_alone():
    """Its limit beside other families is none of the backend of its name."""
    (_, decode, *_), _ = make_families(families_of("auto", HOPPER))
    (own, _), _ = make_families(families_of("decode"))
    assert (decode._beside_others, own._beside_others) == (True, False)


def test_one_family_reads_pages():
    reads = {name for name in GENERATED if make_families(families_of(name))[1] is not None}
    assert reads == {"decode"}
