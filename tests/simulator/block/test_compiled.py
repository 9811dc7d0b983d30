"""Captures that are compiled come near to what they are made of, are held to it, and are only asked for where they can be."""

import pickle
import shutil
from contextlib import nullcontext

import pytest
import torch

from fedfleet.simulator.block import capture
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.compiled import compiled, compiler

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


def compute(given):
    hidden = torch.tanh(given["x"] @ given["w"])
    return {"y": (hidden * given["rate"]).sum(0), "rows": 3}


def blocks(n):
    draw = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(5, 4, generator=draw), "w": torch.randn(4, 3, generator=draw), "rate": 0.5} for _ in range(n)
    ]


def played(captures, given):
    key = captures.key("kind", given)
    found = captures.replay(key, given)
    if found is None:
        found = compute(given)
        captures.ran(key, compute, given, found)
    return found


@needs_compiler
@pytest.mark.slow
def test_a_capture_is_compiled_once_it_is_trusted(monkeypatch):
    asked = []

    def watched(forward, given):
        asked.append(forward)
        return compiled(forward, given)

    monkeypatch.setattr(capture, "compiled", watched)
    captures = Captures(after=0, compiles=True)
    for number, given in enumerate(blocks(5)):
        found = played(captures, given)
        assert len(asked) == (number > 0)
        torch.testing.assert_close(found["y"], compute(given)["y"])
        assert found["rows"] == 3
    assert captures.ready == 1


def test_what_compiles_to_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: lambda *given: [x * 1.01 for x in forward(*given)])
    with pytest.raises(ValueError, match="something else"):
        compiled(lambda x: [x + 1], [torch.ones(3)])
    captures = Captures(after=0, compiles=True)
    for given in blocks(4):
        assert torch.equal(played(captures, given)["y"], compute(given)["y"])
    assert captures.ready == 1


def test_how_near_is_near(monkeypatch):
    for a, b, near in (
        ([1.0, 1000.0], [1.5, 1000.0], True),
        ([1.0, 1000.0], [3.0, 1000.0], False),
        ([torch.nan, 1.0], [torch.nan, 1.0], True),
        ([torch.nan, 1.0], [1.0, 1.0], False),
        ([1, 2], [1, 3], False),
        ([1.0, 2.0], [1, 2], False),
    ):
        monkeypatch.setattr(torch, "compile", lambda forward, a=a, **_: lambda *_: [torch.tensor(a)])
        with nullcontext() if near else pytest.raises(ValueError, match="something else"):
            compiled(lambda b=b: [torch.tensor(b)], [])


def test_without_a_compiler_none_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compiler() is None
    monkeypatch.setattr(shutil, "which", lambda name: "/x" if name == "clang++" else None)
    assert compiler() == "clang++"
    monkeypatch.setenv("CXX", "mine++")
    monkeypatch.setattr(shutil, "which", lambda name: "/x")
    assert compiler() == "mine++"


def test_another_process_compiles_too():
    again = pickle.loads(pickle.dumps(Captures(3, compiles=True)))
    assert (again.after, again.compiles) == (3, True)
