"""Calls that look at values of a paged cache, by device and settings."""

from types import SimpleNamespace

import pytest
import torch

import attndsl
from attndsl import PagedCache
from attndsl.errors import ArgumentError
from attndsl.serving import paged

CAUSAL = attndsl.compile("causal()")
STARTS = torch.tensor([0, 1, 3])


def with_a_wrong_page():
    pages = torch.zeros(4, 4, 2, 8)
    table = torch.tensor([[0, 1], [9, 3]])
    return PagedCache(pages, pages.clone(), table, torch.tensor([5, 6]))


def append():
    x = torch.ones(3, 2, 8)
    with_a_wrong_page().append(x, x, STARTS)


def serve():
    CAUSAL.serve(torch.ones(3, 2, 8), with_a_wrong_page(), STARTS)


def plan():
    CAUSAL.plan(with_a_wrong_page(), STARTS, 3)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Calls ask what they would ask of a cache on a GPU."""
    looks = paged.looks_at_values
    on_a_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(paged, "has_values", lambda tensor: True)
    for module in ("serving.paged", "serving.serve_call"):
        monkeypatch.setattr(f"attndsl.{module}.looks_at_values", lambda tensor: looks(on_a_gpu))


@pytest.mark.parametrize("call", [append, serve, plan])
def test_pages_on_a_gpu_are_checked_where_settings_ask(call, as_on_a_gpu, monkeypatch):
    monkeypatch.setenv("ATTNDSL_VERIFY", "1")
    with pytest.raises(ArgumentError, match="request 1 has page 9"):
        call()
    monkeypatch.setenv("ATTNDSL_VERIFY", "0")
    call()


@pytest.mark.parametrize("call", [append, serve, plan])
def test_pages_on_a_cpu_are_always_checked(call, monkeypatch):
    monkeypatch.setenv("ATTNDSL_VERIFY", "0")
    with pytest.raises(ArgumentError, match="request 1 has page 9"):
        call()


def test_expanded_pages_are_not_written():
    pages = torch.zeros(1, 4, 2, 8).expand(4, -1, -1, -1)
    cache = PagedCache(pages, pages, torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 6]))
    x = torch.ones(3, 2, 8)
    with pytest.raises(ArgumentError, match="k_pages is expanded"):
        cache.append(x, x, STARTS)
    assert CAUSAL.serve(x, cache, STARTS).shape == x.shape
