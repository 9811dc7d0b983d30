"""The graph of objects: cells, globals that are looked up, modules of a package, what objects would be pickled from."""

from __future__ import annotations

import functools
import sys
import threading
from collections import defaultdict, deque
from types import ModuleType

import pytest
import torch

from fedfleet.simulator.object_graph import LARGEST, Hidden, parts, walk

seed = 5  # a global of the name of an attribute
rate = 0.5


def held(f):
    return [(name, value) for name, value in parts(f) if not isinstance(value, type)]


def test_a_cell_that_is_written_to_is_seen_as_it_is_now():
    count = 1

    def bump(by):
        nonlocal count
        count += by

    def later():
        return unset

    assert held(later) == []
    unset = 2
    assert held(later) == [("unset", 2)]
    assert held(bump) == [("count", 1)]
    bump(2)
    assert held(bump) == [("count", 3)]


def test_only_what_is_looked_up_is_a_global():
    def f(schedule):
        return schedule.seed * rate

    def outer():
        return lambda: seed

    assert held(f) == [("rate", 0.5)]
    assert held(outer) == [("seed", 5)]


@pytest.fixture
def package(monkeypatch):
    """A package with a module, imported."""
    top, inner = ModuleType("mine7"), ModuleType("mine7.losses")
    exec("LR = 0.1\nUNUSED = 3\ndef shrink(x):\n    return x * LR\n", vars(inner))
    top.losses = inner  # type: ignore[attr-defined]
    top.__path__ = []
    monkeypatch.setitem(sys.modules, "mine7", top)
    monkeypatch.setitem(sys.modules, "mine7.losses", inner)
    return inner


def made(source: str):
    space: dict = {"__name__": "script"}
    exec(source, space)
    return space["f"]


def test_what_is_taken_from_an_authors_module_is_reached(package):
    for source in (
        "import mine7.losses\ndef f(x): return mine7.losses.shrink(x) + mine7.losses.LR",
        "import mine7.losses as m\ndef f(x): return m.shrink(x) + m.LR",
        "from mine7.losses import shrink, LR\ndef f(x): return shrink(x) + LR",
        "def f(x):\n  from mine7.losses import shrink, LR\n  return shrink(x) + LR",
        "def f(x):\n  import mine7.losses\n  return mine7.losses.shrink(x) + mine7.losses.LR",
        "def f(x):\n  import mine7.losses as m\n  return (lambda: m.shrink(x) + m.LR)()",
        "def f(x):\n  from mine7 import losses\n  return [losses.shrink(i) + losses.LR for i in x]",
    ):
        assert dict(held(made(source))) == {"shrink": package.shrink, "LR": 0.1}


def test_a_module_that_is_held_counts_with_all_that_is_in_it_unless_it_is_a_librarys(package):
    f = made("import mine7.losses, torch\ndef f(x): return run(mine7.losses, torch.add)")
    assert 3 in [v for _, v in parts(dict(held(f))["losses"])]
    assert dict(held(f)) == {"losses": package}
    assert list(parts(torch)) == []


def test_what_lies_hidden_is_what_it_would_be_pickled_from():
    weights = torch.ones(2)
    assert any(x is weights for x, _ in walk(deque([weights])))
    assert any(x is weights for x, _ in walk(defaultdict(lambda: weights)))
    (hidden,) = [x for x, _ in walk(threading.Lock()) if isinstance(x, Hidden)]
    assert hidden.of == "lock"


def test_a_cached_function_is_looked_through():
    weights = torch.ones(2)

    @functools.cache
    def f():
        return weights

    assert any(x is weights for x, _ in walk(f))


def test_numbers_do_not_use_up_what_is_looked_at():
    last = torch.ones(1)
    assert any(x is last for x, _ in walk([[0.5] * (LARGEST + 1), last]))
