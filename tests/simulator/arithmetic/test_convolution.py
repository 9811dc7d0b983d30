"""Convolutions of many clients, their gradients, and the patches that they see, are torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from fedfleet.simulator.arithmetic import convolution
from fedfleet.simulator.arithmetic.convolution import (
    PATCHED,
    Geometry,
    Patches,
    convolve,
    input_gradient,
    unfolded,
)


def test_gradients_by_filters_are_torchs_however_they_are_found(subtests: pytest.Subtests):
    places = itertools.product([(1, 1), (2, 1)], [(0, 0), (2, 1)], [(1, 1), (1, 3)], [(3, 3), (5, 2)])
    many = itertools.cycle([(1, 1, 3), (2, 1, 3), (1, 1, PATCHED // 2), (2, 2, 2), (1, 1, PATCHED + 5)])
    for (stride, padding, dilation, side), (channels, groups, images) in zip(places, many, strict=False):
        geometry = Geometry(stride, padding, dilation, groups)
        with subtests.test(geometry=geometry, images=images):
            x = torch.randn(5, images, channels, 13, 15, dtype=torch.float64)
            filters = torch.randn(6, channels // groups, *side, dtype=torch.float64, requires_grad=True)
            out = [F.conv2d(each, filters, None, *geometry) for each in x]
            d = [torch.randn_like(each) for each in out]
            wanted = torch.stack([torch.autograd.grad(y, filters, g)[0] for y, g in zip(out, d, strict=True)])
            found = Patches(x, torch.stack(d), filters.shape, geometry)
            torch.testing.assert_close(found.each(), wanted, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(found.summed(), wanted.sum(0), rtol=1e-10, atol=1e-10)
            seen = F.unfold(x[0], side, dilation=dilation, padding=padding, stride=stride)
            assert torch.equal(unfolded(x[0], torch.Size(side), geometry), seen)


@pytest.mark.parametrize("way", ["_alone", "_products", "_grouped"])
def test_filters_of_each_client_see_its_own_images_whatever_the_way(way, monkeypatch):
    for other in ("_alone", "_products"):
        monkeypatch.setattr(convolution, other, lambda *_, mine=other == way: mine)
    monkeypatch.setattr(convolution, "PATCHES", 5000)  # of two clients, with the smaller filters
    places = itertools.product([(1, 1), (2, 1)], [(0, 0), (2, 1)], [(1, 1), (1, 3)], [(1, 1), (3, 2), (5, 2)])
    for stride, padding, dilation, side in places:
        geometry = Geometry(stride, padding, dilation, 1)
        x = torch.randn(5, 4, 3, 13, 15, dtype=torch.float64, requires_grad=True)
        filters = torch.randn(5, 6, 3, *side, dtype=torch.float64)
        out = torch.stack([F.conv2d(each, f, None, *geometry) for each, f in zip(x, filters, strict=True)])
        d = torch.randn_like(out)
        (wanted,) = torch.autograd.grad(out, x, d)
        given = x.detach(), filters.flatten(0, 1), geometry
        torch.testing.assert_close(convolve(*given, own=True), out.detach(), rtol=1e-10, atol=1e-10, msg=str(geometry))
        found = input_gradient(d, *given, own=True)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=str(geometry))
