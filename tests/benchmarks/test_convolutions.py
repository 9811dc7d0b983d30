"""Every way of a block's convolutions comes to the same outputs and gradients."""

import json
from typing import get_args

import pytest
import torch

from benchmarks import convolutions
from benchmarks.convolutions import Way


@pytest.mark.parametrize("layer", convolutions.LAYERS)
def test_each_way_finds_the_same(layer):
    finds, taken = convolutions.problem(layer, 3, 2)
    assert set(finds) == set(taken) == set(convolutions.WHAT)
    for what, find in finds.items():
        first, *others = [convolutions.found_by(way, find) for way in get_args(Way)]
        for other in (*others, find()):
            torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-3, msg=what)


def test_the_command(capsys):
    convolutions.main(["--clients", "2", "--batch", "3", "--turns", "1"])
    assert "8 to 16, 5 x 5" in capsys.readouterr().out
    convolutions.main(["--clients", "2", "--batch", "3", "--turns", "1", "--json"])
    found = json.loads(capsys.readouterr().out)["layers"]
    assert [(r["layer"], r["what"]) for r in found] == [(a, b) for a in convolutions.LAYERS for b in convolutions.WHAT]
    assert {tuple(r["over"]) for r in found} == {("groups", "products"), ("products",)}
