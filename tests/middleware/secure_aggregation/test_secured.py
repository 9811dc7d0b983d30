"""Secure sums of integers give the means and totals that they should, but for a range and rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfleet.algorithms.options import CohortOptions
from fedfleet.middleware.secure_aggregation.secured import secured
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.secure_sum import encoded
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.simulator.secure import CLIPPED, WEIGHT, Secure
from tests.algorithms.harness import Bowl, World, build, digits, flat, play, records, rows, script

MEANS, SIZES = (4.0, -1.0, 1.2, 0.7), (1, 3, 2, 5)
BOWL = World(Bowl(), rows(*([(1, m)] * n for m, n in zip(MEANS, SIZES, strict=True))))


def secure(**given) -> Secure:
    wanted = {"threshold": 0.5, "neighbours": None, "bits": 16, "rounding": "nearest", "clip": {"z": 2.0}, "most": 4}
    return Secure(**{**wanted, "numbers": 1, "mask_flop": 0.0, **given})


def averaging(weight: str) -> Any:
    return build("fedavg", BOWL.task, CohortOptions(size=4), lr=1.0, steps=1, batch_size=1, weight=weight)


def sent(algorithm: Any, tree: Any) -> Any:
    return {p.name: {slot: tree for slot in p.reduce} for p in algorithm.phases}


def rounds(algorithm: Any, how: Secure, world: World = BOWL, **given: Any) -> list[Any]:
    phases = {p.name: how for p in algorithm.phases}
    return list(records(secured(algorithm, phases, sent(algorithm, world.task.init(0))), world, **given))


def model(record: Any) -> float:
    return float(record.state.z["x"]["w"])


def test_a_uniform_mean_by_hand(monkeypatch):
    script(monkeypatch, [[0, 1, 2]])
    (found,) = rounds(averaging("uniform"), secure(bits=4), rounds=1)  # seven steps of 2/7 either way, from 1
    moved = [2.0, -2.0, 0.2]  # of 3, -2 and 0.2, the first cut
    integers = [round(x / (2 / 7)) for x in moved]
    assert integers == [7, -7, 1]
    assert model(found) == pytest.approx(1.0 + sum(integers) * 2 / 7 / 3, abs=1e-15)
    assert found.metrics == {"secure_clipped": pytest.approx(1 / 3), "secure_rebuilt": 0}


def test_a_weighted_mean_by_hand(monkeypatch):
    script(monkeypatch, [[1, 2, 3]])
    how = secure(weighted=("z",), weight_bound=4, bits=6, numbers=2)
    (found,) = rounds(averaging("num_examples"), how, rounds=1)
    step, moved, weights = 2 / 31, [-2.0, 0.2, -0.3], [3, 2, 4]  # client 3 has five, and counts as four
    integers = [round(x * w / 4 / step) for x, w in zip(moved, weights, strict=True)]
    assert model(found) == pytest.approx(1.0 + step * 4 * sum(integers) / 9, abs=1e-15)
    assert found.metrics["secure_clipped"] == pytest.approx(1 / 6)  # its weight, of six numbers


def test_a_weight_bound_that_nobody_reaches_only_rounds(monkeypatch):
    script(monkeypatch, [[0, 1, 2, 3]] * 2)
    plain = play(averaging("num_examples"), BOWL, 1)[0]
    how = secure(weighted=("z",), weight_bound=5, bits=30, clip={"z": 8.0}, numbers=2)
    (found,) = rounds(averaging("num_examples"), how, rounds=1)
    assert model(found) == pytest.approx(float(plain["x"]["w"]), abs=5 * 8 / 2**29)
    assert model(found) != float(plain["x"]["w"])


def worked(name: str, options: dict[str, Any], how: dict[str, Any] | None, **given: Any) -> list[torch.Tensor]:
    world = digits("classification", clients=12)
    algorithm = build(name, world.task, CohortOptions(size=6), steps=2, batch_size=5, **options)
    z = world.task.init(0)
    if how is not None:
        (phase,) = algorithm.phases
        weighted = tuple(s for s, r in phase.reduce.items() if phase.weight == "num_examples" and r.weighted)
        numbers = len(phase.reduce) * T.count(z) + bool(weighted)
        made = secure(
            clip=dict.fromkeys(phase.reduce, 4.0),
            weighted=weighted,
            weight_bound=200 if weighted else 1,
            most=6,
            numbers=numbers,
            **{"bits": 24, "rounding": "stochastic", **how},
        )
        algorithm = secured(algorithm, {phase.name: made}, sent(algorithm, z))
    return [flat(m) for m in play(algorithm, world, 3, **given)]


@pytest.mark.parametrize(("name", "options"), [("fedavg", {}), ("fedavg", {"weight": "uniform"}), ("scaffold", {})])
def test_with_many_bits_it_is_the_algorithm_itself(name, options):
    plain, hidden = (worked(name, options, how) for how in (None, {"bits": 30}))
    for a, b in zip(plain, hidden, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6)


@pytest.mark.parametrize(("name", "options"), [("fedavg", {}), ("scaffold", {})])
def test_the_sum_is_the_same_to_the_bit_however_clients_are_cut_into_blocks(name, options):
    one, *others = (worked(name, options, {}, block_size=b) for b in (1, 2, 3, 6))
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("inner", ["batched", "factored"])
def test_many_clients_at_once_send_what_one_sends_alone(inner):
    for a, b in zip(worked("fedavg", {}, {}), worked("fedavg", {}, {}, inner=inner), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize("neighbours", [None, 2])
def test_masked_in_earnest_it_is_the_same_to_the_bit_whoever_drops_out(name, neighbours):
    pytest.importorskip("Crypto", reason="pycryptodome is not installed")
    dropout = {"shares": 0.1, "masked": 0.15, "unmasking": 0.1}
    how = {"neighbours": neighbours, "threshold": 0.4, "dropout": dropout}
    plain, earnest = (worked(name, {}, {**how, "execute": e}, attempts=50) for e in (False, True))
    for a, b in zip(plain, earnest, strict=True):
        assert torch.equal(a, b)


numbers = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=20)


@given(numbers, st.integers(2, 20), st.sampled_from(["stochastic", "nearest", "toward_zero"]), st.integers(1, 9))
def test_integers_stand_for_numbers_to_within_a_step(x, bits, rounding, examples):
    how = secure(bits=bits, rounding=rounding, weighted=("z",), weight_bound=6)
    given = torch.tensor(x)
    found = encoded(how, {"z": {"a": given}}, {}, torch.tensor(examples), rng.key(1))
    weight = min(examples, 6)
    exact = given.double().clamp(-2, 2) * weight / 6
    q, step = found.send["z"]["a"], how.step("z")
    assert torch.equal(q, q.round())
    assert float(q.abs().max()) <= how.half == 2 ** (bits - 1) - 1
    error = (q * step - exact).abs() / step
    assert float(error.max()) <= (0.5 if rounding == "nearest" else 1.0) + 1e-9
    if rounding == "toward_zero":
        assert ((q * step).abs() <= exact.abs() * (1 + 1e-12)).all()
    assert float(found.send[WEIGHT]) == weight
    assert float(found.send[CLIPPED]) == int((given.abs() > 2).sum()) + (examples > 6)
    assert (found.numbers, found.bits) == (len(x) + 1, len(x) * how.modulus_bits + 6)  # 2 * 4 * 6 is below 2^6


def test_a_model_is_sent_as_what_it_moved_by_and_other_slots_as_they_are():
    how = secure(clip={"z": 2.0, "c": 8.0}, bits=8)
    z, start = {"a": torch.tensor([101.0])}, {"a": torch.tensor([100.0])}
    found = encoded(how, {"z": z, "c": {"a": torch.tensor([4.0])}}, {"z": start}, torch.tensor(1), rng.key(0)).send
    assert float(found["z"]["a"]) == round(1 / (2 / 127))
    assert float(found["c"]["a"]) == round(4 / (8 / 127))


def test_stochastic_rounding_is_right_on_average_and_draws_of_each_client():
    how = secure(bits=3, rounding="stochastic")  # steps of 2/3
    x = torch.full((20_000,), 0.25)
    q = encoded(how, {"z": {"a": x}}, {}, torch.tensor(1), rng.key(4)).send["z"]["a"]
    share = 0.25 / (2 / 3)
    assert set(q.tolist()) == {0.0, 1.0}
    assert float(q.mean()) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 20_000))
    other = encoded(how, {"z": {"a": x}}, {}, torch.tensor(1), rng.key(5)).send["z"]["a"]
    assert not torch.equal(q, other)


@settings(max_examples=30)
@given(st.integers(2, 32), st.integers(2, 5000), st.integers(1, 10**6))
def test_the_modulus_has_room_for_the_largest_sums_of_either_sign_and_no_more(bits, most, bound):
    how = secure(bits=bits, most=most, weighted=("z",), weight_bound=bound)
    assert 2 ** (how.modulus_bits - 1) <= 2 * most * how.half < 2**how.modulus_bits
    assert 2 ** (how.weight_bits - 1) <= 2 * most * bound < 2**how.weight_bits
    assert secure(bits=bits, most=most).weight_bits == 0


@pytest.mark.parametrize("at", [3.0, -3.0])
def test_the_largest_sums_do_not_wrap(monkeypatch, at):
    world = World(Bowl(), rows(*[[(1, 1 + at)]] * 4))
    for most, bits in ((4, 2), (4, 9)):  # sums of 4 of 1, modulo 16; of 4 of 255
        script(monkeypatch, [[0, 1, 2, 3]])
        (found,) = rounds(averaging("uniform"), secure(bits=bits, most=most), world, rounds=1)
        assert model(found) == pytest.approx(1 + math.copysign(2.0, at), abs=1e-12)


def test_more_clients_than_the_modulus_has_room_for_end_the_run(monkeypatch):
    script(monkeypatch, [[0, 1, 2]])
    with pytest.raises(FedfleetError, match=r"3 clients in a sum .* room for 2: set secure_aggregation.most_clients=3"):
        rounds(averaging("uniform"), secure(most=2), rounds=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_client_whose_numbers_are_not_finite_is_found(monkeypatch, bad):
    script(monkeypatch, [[0, 1]])
    world = World(Bowl(), rows([(1, 0.5)], [(1, bad)]))
    with pytest.raises(ClientError, match="client 1"):
        rounds(averaging("uniform"), secure(), world, rounds=1)


def test_a_void_exchange_is_tried_again_with_another_cohort_and_counted(monkeypatch):
    script(monkeypatch, [[0, 1, 2, 3]] * 40)
    how = secure(threshold=1.0, dropout={"masked": 0.2}, clip={"z": 8.0})
    (found,) = rounds(averaging("uniform"), how, rounds=1, attempts=40)
    assert len(found.phases) > 1
    *aborted, last = found.phases
    assert all(p.secured.aborted for p in aborted)
    assert last.secured.aborted is None
    assert [p.counts["client_steps"] for p in found.phases] == [0] * len(aborted) + [4]
    for p in aborted:
        assert p.counts["bytes_up"] == p.secured.bytes_up
        assert p.counts["floats_up"] == p.counts["completed"] == int(p.secured.masked.sum())
        assert p.counts["bytes_down"] == p.secured.bytes_down + p.counts["invited"] * p.bytes_down_each
    assert last.counts["bytes_up"] == last.secured.bytes_up + 4 * how.message_bytes
    assert last.counts["floats_up"] == 4
    assert model(found) == pytest.approx(sum(MEANS) / 4, abs=1e-3)
    few = replace(how, threshold=0.5)
    (found,) = rounds(averaging("uniform"), few, rounds=1, attempts=40, min_responses=4)
    aborted = [p for p in found.phases[:-1] if not p.secured.aborted]
    assert aborted
    for p in aborted:  # enough to unmask, and too few for the round
        assert p.counts["bytes_up"] == p.secured.bytes_up + p.counts["completed"] * how.message_bytes
