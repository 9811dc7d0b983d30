"""Every way of a block's convolutions comes to the same gradients."""

import json

import pytest
import torch

from benchmarks import convolutions


@pytest.mark.parametrize("layer", convolutions.LAYERS)
def test_each_way_finds_the_same_gradients(layer):
    inputs = convolutions.inputs(layer, 3)
    x, filters, d = inputs
    each = [torch.nn.grad.conv2d_weight(a, filters.shape[1:], b) for a, b in zip(x, d, strict=True)]
    expected = [torch.stack(each)]
    if x.requires_grad:
        by_inputs = [torch.nn.grad.conv2d_input(a.shape, f, b) for a, f, b in zip(x, filters, d, strict=True)]
        expected.append(torch.stack(by_inputs))
    assert x.requires_grad == (layer not in ("lenet, 1", "cnn, 1"))
    for way in convolutions.WAYS.values():
        for found, right in zip(convolutions.gradients(way, *inputs), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)


def test_the_command(capsys):
    convolutions.main(["--clients", "2", "--turns", "3"])
    assert "patches over the first" in capsys.readouterr().out
    convolutions.main(["--clients", "2", "--turns", "3", "--json"])
    found = json.loads(capsys.readouterr().out)["layers"]
    assert [(r["layer"], r["clients"]) for r in found] == [(layer, 2) for layer in convolutions.LAYERS]
    assert set(found[0]["over"]) == {"groups", "patches"}
