"""Copies of what functions and objects hold tell whether it changed, whatever it is, or stayed as it was."""

import itertools
import random
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedfleet.simulator.state_copy import StateCopy

COUNT = 0


class Counter:
    made = 0

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1


def a_cell():
    n = 0

    def f():
        nonlocal n
        n += 1

    return f


def a_global():
    global COUNT
    COUNT += 1


def of_a_class():
    Counter.made += 1


def a_default(seen=[]):  # noqa: B006
    seen.append(1)


def a_list():
    seen = []
    return lambda: seen.append(1)


def a_mapping():
    seen = {"last": 0}
    return lambda: seen.update(last=seen["last"] + 1)


def a_net():
    net = nn.Sequential(nn.Linear(2, 2))
    return lambda: setattr(net[0], "scale", getattr(net[0], "scale", 1) + 1)


def drawing(generator, draw):
    return lambda: draw(generator)


def through(x, f):
    return partial(f, x)


CHANGES = {
    "an attribute": Counter(),
    "a slot": Slotted(),
    "a cell": a_cell(),
    "a global": a_global,
    "a class": of_a_class,
    "a default": a_default,
    "a list": a_list(),
    "a mapping": a_mapping(),
    "a net": a_net(),
    "torch": drawing(torch.Generator(), lambda g: torch.rand(2, generator=g)),
    "numpy": drawing(np.random.default_rng(0), lambda g: g.random()),
    "numpy's old": drawing(np.random.RandomState(0), lambda g: g.rand()),
    "random": drawing(random.Random(0), lambda g: g.random()),
    "an iterator": drawing(itertools.count(), next),
    "a tensor": through(torch.zeros(2), lambda x: x.add_(1)),
    "an array": through(np.zeros(2), lambda x: x.__iadd__(1)),
    "a deque": through(deque(), lambda x: x.append(1)),
    "a set": through(set(), lambda x: x.add(len(x))),
    "bytes": through(bytearray(2), lambda x: x.append(1)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_seen(how):
    held = StateCopy(CHANGES[how])
    assert held.changed() is None
    CHANGES[how]()
    assert held.changed() is not None


def test_it_is_named():
    counter, seen = Counter(), []
    held = StateCopy({"counter": counter, "seen": seen})
    counter()
    assert held.changed() == "'calls'"
    held = StateCopy({"counter": counter, "seen": seen})
    seen.append(1)
    assert held.changed() == "'seen' (a list)"


def test_what_is_there_again_as_it_was_has_not_changed():
    """Such as the shape that a net keeps of its input."""
    net = nn.Linear(2, 2)
    net.shape, net.big = torch.zeros(3, 4).shape, 10**6  # pyright: ignore[reportAttributeAccessIssue]
    held = StateCopy(net, lambda: torch.float32)
    net.shape, net.big = torch.zeros(3, 4).shape, 10**6 + 0  # pyright: ignore[reportAttributeAccessIssue]
    net.eval().train()
    assert held.changed() is None


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_the_weights_of_the_last_call(layer):
    net = layer(2, 2)
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    held = StateCopy(net)
    torch.func.grad(lambda w: functional_call(net, w, (torch.zeros(1, 2),))[0].sum())(weights)
    assert held.changed() is None


def test_what_cannot_be_looked_into_is_let_be():
    with Path(__file__).open() as file:
        held = StateCopy({"a generator": (n for n in range(3)), "a file": file, "a module": torch.nested})
        assert held.changed() is None


def test_tables_have_not_changed():
    held = StateCopy({"series": pd.Series([1.0, 2.0]), "table": pd.DataFrame({"a": [1, 2]})})
    assert held.changed() is None
