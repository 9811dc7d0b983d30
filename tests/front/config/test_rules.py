"""The rules behind ``auto``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedfleet
from fedfleet.config import rules
from fedfleet.simulator.arithmetic.factored import Notes

NET = {"x": {"0.weight": torch.zeros(20, 30), "0.bias": torch.zeros(20), "2.weight": torch.zeros(10, 20)}}


@given(*(st.integers(1, 10**most) for most in (5, 9, 3, 5)), st.sampled_from(["cpu", "cuda"]))
def test_blocks_hold_the_cohort_in_a_power_of_two(cohort, products, step, examples, device):
    notes = Notes(products={"train": products}, step_examples=step, examples=max(step, examples))
    size = rules.block_size(cohort, NET, notes, device)
    assert 1 <= size <= rules.SIZES[device].largest
    light = cohort * step * 6 * products <= rules.SIZES[device].idle_flop and cohort <= rules.SIZES[device].largest
    assert size == cohort if light else size <= max(1, -(-cohort // 2))  # else two workers share it


def test_light_clients_make_large_blocks_and_heavy_ones_small():
    light, heavy = Notes(products={"train": 1000}), Notes(products={"train": 10**8})
    assert rules.block_size(1000, NET, light, "cpu") > rules.block_size(1000, NET, heavy, "cpu") >= 2
    assert rules.block_size(10**5, NET, light, "cuda") > rules.block_size(10**5, NET, light, "cpu")


def test_inner():
    muls = {"x.0.weight": {"mul"}}
    for reasons, device, floats, expected in (
        ({}, "cpu", 1, "factored"),
        ({"x.2.weight": {"pow"}}, "cpu", 1, "factored"),
        (muls, "cpu", 1, "batched"),
        (muls, "cpu", 10**6, "serial"),
        (muls, "cuda", 10**6, "batched"),
    ):
        z = {"x": {**NET["x"], "0.bias": torch.zeros(floats)}} if floats > 1 else NET
        assert rules.inner(z, Notes(reasons=reasons), device) == expected, (reasons, device, floats)


def test_convolutions_that_move_are_batched_where_the_model_is_small():
    for filters, floats, steps, device, expected in (
        (99, 1, 5, "cpu", "batched"),  # each client's own from its second step on
        (99, 1, 2, "cpu", "factored"),
        (99, 1, 5, "cuda", "factored"),
        (1, 99, 5, "cpu", "factored"),  # most are of linear layers
        (10**5, 1, 5, "cpu", "factored"),  # too many to be batched
    ):
        z = {"x": {"conv": torch.zeros(filters, 1, 1, 1), "out": torch.zeros(floats, 1)}}
        assert rules.inner(z, Notes(step_examples=10, examples=10 * steps), device) == expected, (
            filters,
            floats,
            steps,
        )


def test_a_small_job_is_one_of_little_arithmetic_in_few_steps():
    heavy = Notes(step_examples=10, examples=50, flop={"a": 1e6, "b": 9e5})  # 0.95e8 a client
    light = Notes(step_examples=10, examples=50, flop={"train": 1e4})
    for rounds, cohort, blocks, notes, small in (
        (100, 10, 2, light, True),
        (1000, 10, 2, light, False),  # 1000 rounds of 2 blocks of 5 steps of 2 ms
        (100, 10, 40, light, False),
        (10, 100, 2, heavy, True),
        (10, 1000, 2, heavy, False),
    ):
        assert rules.small(rounds, cohort, blocks, NET, lambda notes=notes: notes) == small, (rounds, cohort, blocks)
    large = {"x": {"w": torch.zeros(1, 1).expand(10**5, 10**4)}}  # which is not tried to see that it is not small
    assert not rules.small(10, 10, 2, large, lambda: pytest.fail("tried"))


SMALL = {"rounds": 1, "population": {"clients": 10}, "cohort": {"size": 4}}


@pytest.mark.parametrize(("given", "kind"), [
    ({}, "local"), ({"rounds": 100_000}, "local"), ({"rounds": 100_000, "executor.block_size": 2}, "ray"),
    ({"executor.kind": "ray"}, "ray"), ({"executor.actors": 1}, "ray"),
    ({"executor.cpus_per_actor": 0.5}, "ray"), ({"executor.inner": "serial", "executor.block_size": 2}, "local"),
    ({"faults.client_timeout_s": 60}, "ray"), ({"rounds": 100_000, "executor.kind": "local"}, "local"),
])  # fmt: skip
def test_ray_is_for_what_is_not_small_or_asks_for_it(given, kind):
    assert fedfleet.Experiment(fedfleet.load(SMALL, given)).config.executor.kind == kind
