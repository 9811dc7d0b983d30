"""The rules behind ``auto``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.config import rules
from fedfleet.simulator.arithmetic.factored import Notes

NET = {"x": {"0.weight": torch.zeros(20, 30), "0.bias": torch.zeros(20), "2.weight": torch.zeros(10, 20)}}


@given(
    st.integers(1, 10**5),
    st.integers(1, 10**9),
    st.integers(1, 1000),
    st.integers(1, 10**5),
    st.sampled_from(["cpu", "cuda"]),
)
def test_blocks_hold_the_cohort_in_a_power_of_two(cohort, products, step, examples, device):
    notes = Notes(products={"train": products}, step_examples=step, examples=max(step, examples))
    size = rules.block_size(cohort, NET, notes, device)
    assert 1 <= size <= rules.SIZES[device].largest
    assert size <= max(1, -(-cohort // 2))  # never the whole cohort, so that two workers share it


def test_light_clients_make_large_blocks_and_heavy_ones_small():
    light, heavy = Notes(products={"train": 1000}), Notes(products={"train": 10**8})
    assert rules.block_size(1000, NET, light, "cpu") > rules.block_size(1000, NET, heavy, "cpu") >= 2
    assert rules.block_size(10**5, NET, light, "cuda") > rules.block_size(10**5, NET, light, "cpu")


@pytest.mark.parametrize(
    ("reasons", "device", "floats", "expected"),
    [
        ({}, "cpu", 1, "factored"),
        ({"x.2.weight": {"pow"}}, "cpu", 1, "factored"),
        ({"x.0.weight": {"mul"}}, "cpu", 1, "batched"),
        ({"x.0.weight": {"mul"}}, "cpu", 10**6, "serial"),
        ({"x.0.weight": {"mul"}}, "cuda", 10**6, "batched"),
    ],
)
def test_inner(reasons, device, floats, expected):
    z = {"x": {**NET["x"], "0.bias": torch.zeros(floats)}} if floats > 1 else NET
    assert rules.inner(z, Notes(reasons=reasons), device) == expected
