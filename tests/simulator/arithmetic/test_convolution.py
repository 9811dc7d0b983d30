"""Convolutions of many clients, their gradients, and the patches that they see, are torch's."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from fedfleet.simulator.arithmetic import convolution
from fedfleet.simulator.arithmetic.convolution import (
    PATCHED,
    Geometry,
    Of,
    Patches,
    Way,
    convolve,
    input_gradient,
    unfolded,
)


def test_gradients_by_filters_are_torchs_however_they_are_found(subtests: pytest.Subtests, monkeypatch):
    places = itertools.product([(1, 1), (2, 1)], [(0, 0), (2, 1)], [(1, 1), (1, 3)], [(3, 3), (5, 2)])
    many = itertools.cycle([(1, 1, 3), (2, 1, 3), (1, 1, PATCHED // 2), (2, 2, 2), (1, 1, PATCHED + 5)])
    monkeypatch.setattr(convolution, "AVX2", True)  # so that there are patches for filters that see one channel
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


@pytest.mark.parametrize("way", get_args(Way))
def test_filters_of_each_client_see_its_own_images_whatever_the_way(way, monkeypatch):
    monkeypatch.setattr(convolution, "way", lambda *_: way)
    monkeypatch.setattr(convolution, "PATCHES", 5000)  # of two clients, with the smaller filters
    places = itertools.product([(1, 1), (2, 1)], [(0, 0), (2, 1)], [(1, 1), (1, 3)], [(1, 1), (3, 2), (5, 2)])
    for stride, padding, dilation, side in places:
        geometry = Geometry(stride, padding, dilation, 1)
        x = torch.randn(5, 4, 3, 13, 15, dtype=torch.float64, requires_grad=True)
        filters = torch.randn(5, 6, 3, *side, dtype=torch.float64, requires_grad=True)
        out = torch.stack([F.conv2d(each, f, None, *geometry) for each, f in zip(x, filters, strict=True)])
        d = torch.randn_like(out)
        wanted, by_filters = torch.autograd.grad(out, (x, filters), d)
        given = x.detach(), filters.detach().flatten(0, 1), geometry
        torch.testing.assert_close(convolve(*given, own=True), out.detach(), rtol=1e-10, atol=1e-10, msg=str(geometry))
        found = input_gradient(d, *given, own=True)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=str(geometry))
        each = Patches(x.detach(), d, filters.shape[1:], geometry).each()
        torch.testing.assert_close(each, by_filters, rtol=1e-10, atol=1e-10, msg=str(geometry))


@pytest.mark.parametrize("avx2", [False, True])
def test_the_way_goes_by_shapes_and_the_processor(avx2, monkeypatch):
    monkeypatch.setattr(convolution, "AVX2", avx2)
    alone, groups, products = get_args(Way)
    first = products if avx2 else alone
    small = products if avx2 else groups
    rows = [  # channels, side of filters and images, stride, groups: outputs, gradients by filters and by inputs
        ((1, 5, 28, 1, 1), (alone, first, products)),
        ((1, 3, 14, 1, 1), (groups, small, products)),
        ((3, 3, 32, 1, 1), (alone, alone, products)),
        ((4, 3, 32, 1, 1), (alone, alone, alone)),
        ((6, 5, 12, 1, 1), (alone, groups, alone)),
        ((8, 5, 12, 1, 1), (groups, groups, groups)),
        ((8, 3, 16, 2, 1), (groups, groups, alone)),
        ((8, 3, 19, 1, 1), (alone, alone, alone)),
        ((8, 1, 16, 2, 1), (alone, alone, products)),
        ((8, 1, 8, 1, 1), (alone, alone, alone)),
        ((1, 3, 8, 1, 4), (alone, alone, alone)),
    ]
    for (channels, k, side, stride, of_groups), wanted in rows:
        geometry = Geometry((stride, stride), (0, 0), (1, 1), of_groups)
        x = torch.empty(3, 10, channels * of_groups, side, side)
        found = tuple(convolution.way(of, torch.Size((16, channels, k, k)), geometry, x) for of in get_args(Of))
        assert found == wanted, (channels, k, side, stride, of_groups)
