"""Provenance of parts made in Python: what tells two apart, and what people read of them."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from fedfleet.assembly import identity
from fedfleet.assembly.provenance import describe, differences
from fedfleet.simulator.author import T


class Net(nn.Module):
    def __init__(self, hidden=64, scale=1.0, act=torch.relu, mask=1.0):
        super().__init__()
        generator = torch.random.fork_rng()
        with generator:
            torch.manual_seed(0)
            self.a = nn.Linear(4, hidden)
        self.scale, self.act = scale, act
        self.register_buffer("mask", torch.tensor(mask), persistent=False)

    def forward(self, x):
        return self.act(self.a(x)) * self.scale * self.mask


class Task:
    def __init__(self, net, loss=None):
        self.net = net

    def run(self, x):
        return self.net(x)


def by(x):
    return lambda: x


def times(lr):
    def f(d):
        return lr * d

    return f


def up(d):
    return 2 * d


def down(d):
    return 0.5 * d


class Term:
    __scale__ = 1.0
    kind = "plain"

    def __init__(self, w=0.25):
        self.w, self.__private = w, w


@dataclass(frozen=True, slots=True)
class Options:
    lr: float = 0.1


class Open(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    weight: torch.Tensor = torch.ones(1)
    _hidden: float = 1.0


def opened(weight, hidden=1.0):
    found = Open(weight=torch.tensor([weight]))
    found._hidden = hidden
    return found


def scaled_class(value):
    return type("Local", (), {"__scale__": value, "__call__": lambda self: self.__scale__})()


class Loose:
    """Not to be pickled by itself, but for its attributes."""

    def __init__(self, w):
        self.w = w

    def __reduce__(self):
        raise TypeError


PAIRS = {
    "attribute of a net": lambda c: Task(Net(scale=c)),
    "function of a net": lambda c: Task(Net(act=(torch.relu, torch.tanh)[c])),
    "buffer that is not kept": lambda c: Task(Net(mask=float(c))),
    "places of equal options": lambda c: [by(times(0.5)), by(times((1.0, 0.5)[c])), by(times(1.0))],
    "how often an option": lambda c: [Term(1.0), Term((0.5, 1.0)[c]), Term(0.5)],
    "roles of functions": lambda c: by({"client": (up, down)[c], "server": (down, up)[c]}),
    "function of torch": lambda c: by((torch.sign, torch.tanh)[c]),
    "function of fedfleet": lambda c: by((T.add, T.sub)[c]), "ufunc": lambda c: by((np.add, np.subtract)[c]),
    "method of torch": lambda c: by((torch.Tensor.add, torch.Tensor.sub)[c]),
    "class of torch": lambda c: by((nn.ReLU, nn.Tanh)[c]), "range": lambda c: by(range(c + 1)),
    "slice": lambda c: by(slice(c)), "Decimal": lambda c: by(Decimal(c)), "Fraction": lambda c: by(Fraction(c)),
    "number of numpy": lambda c: by(np.float32(c)), "dtype": lambda c: by((torch.float32, torch.float64)[c]),
    "deque": lambda c: by(deque([float(c)])), "bytearray": lambda c: by(bytearray([c])),
    "Series": lambda c: by(pd.Series([float(c)])), "words": lambda c: by(pd.DataFrame({"a": ["x", ("y", "z")[c]]})),
    "array of objects": lambda c: by(np.array([None, c], dtype=object)),
    "strided array": lambda c: by(np.arange(6).reshape(2, 3)[:, c:].T),
    "sparse tensor": lambda c: by(torch.tensor([0.0, c + 1.0]).to_sparse()), "set": lambda c: by({"a", ("b", "c")[c]}),
    "set of functions": lambda c: by({up, (down, times)[c]}), "ordered": lambda c: by(OrderedDict(a=c)),
    "private of pydantic": lambda c: opened(1.0, float(c)), "tensor of pydantic": lambda c: opened(float(c)),
    "private attribute": lambda c: Term(float(c)), "dunder of a class": scaled_class,
    "what pickle refuses": lambda c: Loose(c), "number and text": lambda c: by((1, "1")[c]),
    "whole and broken": lambda c: by((1, 1.0)[c]),
    "after a long list": lambda c: by([[i + 0.5 for i in range(200_001)], times(c)]),
}  # fmt: skip


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_what_differs_is_told_apart_and_what_does_not_is_the_same(make):
    base, again, other = describe(make(0)), describe(make(0)), describe(make(1))
    assert base == again
    assert base["digest"] != other["digest"]
    assert base["not_recorded"] == []
    assert differences(base, other)[0]


def test_options_are_what_objects_hold_not_what_their_makers_would_have_taken():
    found = describe(Task(Net(hidden=8, scale=5.0)))["options"]
    assert (found.pop("net")[:11], found) == ("Net sha256:", {"scale": 5.0, "act": "torch.relu"})
    assert describe(Term(3.0))["options"] == {"kind": "plain", "w": 3.0, "_Term__private": 3.0}
    assert describe(by(Options()))["options"] == {"x": {"type": "Options", "lr": 0.1}}
    assert describe(by(Options(0.5)))["options"] == {"x": {"type": "Options", "lr": 0.5}}
    assert describe(opened(2.0))["options"]["weight"] == describe(by(torch.tensor([2.0])))["options"]["x"]


def test_equal_options_at_other_places_differ_by_their_digest():
    one, other = describe(PAIRS["roles of functions"](0)), describe(PAIRS["roles of functions"](1))
    assert one["options"] == other["options"]
    assert differences(one, other) == tuple(f"digest {d['digest'][:8]}" for d in (one, other))


def test_what_cannot_be_looked_into_is_said():
    found = describe(by([threading.Lock(), 1]))
    assert (found["not_recorded"], describe(by(x for x in ()))["not_recorded"]) == (["lock"], ["generator"])


def test_a_limit_that_is_reached_is_said(monkeypatch):
    monkeypatch.setattr(identity, "LARGEST", 50)
    assert describe([Term() for _ in range(50)])["not_recorded"] == ["what comes after 50 objects"]
    assert describe([0.5] * 1000)["not_recorded"] == []
    monkeypatch.setattr(identity, "WHOLE", 10)
    assert "sha256 of one element in 4:" in describe(by(torch.ones(40)))["options"]["x"]


@pytest.mark.parametrize("few", [torch.tensor([1.0, 0.5]), np.array([1.0, 0.5])])
def test_few_numbers_are_said_one_by_one(few: torch.Tensor | np.ndarray) -> None:
    assert describe(by(few))["options"]["x"] == [1.0, 0.5]
    assert "sha256" in describe(by(few * np.nan))["options"]["x"]


def test_many_options_are_not_read_by_anybody():
    found = describe([Term(float(i)) for i in range(1000)])["options"]
    assert (len(found), found["…"]) == (101, "more, which only the digest tells")


def test_what_holds_itself_has_an_end():
    ring: list = [1.0]
    ring.append(ring)
    term = Term()
    term.me = term  # type: ignore[attr-defined]
    assert describe(by(ring)) == describe(by(ring))
    assert describe(term)["digest"] != describe(Term())["digest"]
