"""Exchanges of secure aggregation: who is there at each message, when it is aborted, and its bytes and seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.hardware import Assigned, Hardware, HeterogeneousDevices
from fedfleet.simulator.fleet.policies import Deadline
from fedfleet.simulator.fleet.responses import Federation, Outcome, respond
from fedfleet.simulator.fleet.secagg import exchange, needed, neighbours
from fedfleet.simulator.secure import Secure
from tests.algorithms.harness import Fixed

KEY = rng.key(3)
NEVER = 1e9


@dataclass(frozen=True)
class Until:
    """Clients that are online until a moment."""

    leaves: tuple[float, ...]

    def online(self, key, clients: Tensor, seconds: Tensor) -> Tensor:
        return seconds < torch.tensor(self.leaves, dtype=torch.float64)[clients]


def secure(**given) -> Secure:
    wanted = {"threshold": 0.5, "neighbours": None, "bits": 16, "rounding": "nearest", "clip": {"z": 1.0}, "most": 8}
    return Secure(**{**wanted, "numbers": 100, "mask_flop": 0.0, **given})


def happen(how: Secure, federation: Federation, clients: int, load: Load | None = None, key: Tensor = KEY):
    zero = torch.zeros(clients, dtype=torch.int64)
    load = load or Load(zero + 1, zero + 1)
    answers, went = exchange(how, federation, torch.arange(clients), zero, load, 0.0, key, key)
    assert went is not None
    return answers, went


# Each exchange takes a second: keys until 1, parts until 2, the work until 3, unmasking until 4.
LEAVES = (NEVER, NEVER, NEVER, 1.5, 2.5, 3.5)  # of six, one goes before each message, but for the first
SIX = Federation(availability=Until(LEAVES), devices=Fixed((1.0,) * 6))
KEYS_UP, KEYS_DOWN = 6 * 2 * 32, 6 * 5 * 2 * 32
PARTS_UP, PARTS_DOWN = 5 * 5 * 2 * 32, 5 * 4 * 2 * 32  # five have shared, with all five others, of whom four are left
MESSAGE = secure().message_bytes


def names(who: Tensor) -> list[int]:
    return who.nonzero().flatten().tolist()


def test_an_exchange_by_hand():
    answers, went = happen(secure(), SIX, 6)
    assert [names(w) for w in (went.advertised, went.shared, went.masked, went.unmasking)] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 4, 5],
        [0, 1, 2, 5],
        [0, 1, 2],
    ]
    assert (went.threshold, went.aborted, went.asked, went.rebuilt) == (3, None, 5, 1)
    assert [Outcome(f).name for f in answers.outcome.tolist()] == [
        "COMPLETED",
        "COMPLETED",
        "COMPLETED",
        "UNAVAILABLE",
        "FAILED",
        "COMPLETED",
    ]
    assert went.bytes_up == KEYS_UP + PARTS_UP + 3 * 5 * 32
    assert went.bytes_down == KEYS_DOWN + PARTS_DOWN
    assert (answers.duration_s, answers.seconds.tolist()) == (4.0, [3.0, 3.0, 3.0, 0.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ("threshold", "stage", "duration", "up", "down", "asked"),
    [
        (0.9, "sharing keys", 2.0, KEYS_UP + PARTS_UP, KEYS_DOWN, 0),
        (0.67, "masked messages", 3.0, KEYS_UP + PARTS_UP + 4 * MESSAGE, KEYS_DOWN + PARTS_DOWN, 5),
        (0.6, "unmasking", 4.0, KEYS_UP + PARTS_UP + 4 * MESSAGE + 3 * 5 * 32, KEYS_DOWN + PARTS_DOWN, 5),
    ],
)
def test_it_is_void_where_too_few_are_left_after_any_message(threshold, stage, duration, up, down, asked):
    answers, went = happen(secure(threshold=threshold), SIX, 6)
    assert went.aborted is not None
    assert f"aborted after {stage}" in went.aborted
    assert (answers.duration_s, went.bytes_up, went.bytes_down, went.asked) == (duration, up, down, asked)
    if not asked:
        assert names(answers.outcome == int(Outcome.FAILED)) == [0, 1, 2, 3, 4, 5]
        assert answers.seconds.tolist() == [2.0] * 6


def test_where_nobody_is_there_nothing_happens_and_who_is_not_takes_no_time():
    nobody = Federation(availability=Until((0.0,) * 6), devices=Fixed((1.0,) * 6))
    answers, went = happen(secure(), nobody, 6)
    assert (went.bytes_up, went.bytes_down, went.asked, answers.duration_s) == (0, 0, 0, 0.0)
    assert (answers.outcome == int(Outcome.UNAVAILABLE)).all()
    few = Federation(availability=Until((0.0, 0.0, 0.0, 0.0, 1.5, 1.5)), devices=Fixed((1.0,) * 6))
    answers, went = happen(secure(), few, 6)
    assert went.aborted is not None
    assert answers.seconds.tolist() == [0.0] * 4 + [2.0] * 2


def test_exactly_as_many_as_are_needed_are_enough():
    for gone in range(4):
        leaves = (NEVER,) * (6 - gone) + (3.5,) * gone
        federation = Federation(availability=Until(leaves), devices=Fixed((1.0,) * 6))
        _, went = happen(secure(threshold=4 / 6), federation, 6)
        assert (went.threshold, went.aborted is None) == (4, gone <= 2)


@pytest.mark.parametrize(
    ("threshold", "size", "parts"), [(0.67, 100, 67), (0.67, 10, 7), (0.55, 100, 55), (1.0, 7, 7), (0.01, 50, 2)]
)
def test_the_threshold_is_rounded_up_and_nobody_is_seen_alone(threshold, size, parts):
    assert needed(threshold, size) == parts


def test_one_client_is_no_sum():
    _, went = happen(secure(threshold=0.01), Federation(devices=Fixed((1.0,))), 1)
    assert went.aborted is not None


@pytest.mark.parametrize(("n", "m", "bits", "factor"), [(2**10, 2**20, 16, 1.73), (2**14, 2**24, 16, 1.98)])
def test_bytes_are_those_of_the_paper(n, m, bits, factor):
    # Bonawitz et al., Section 7.1: 2 n K + (5 n - 4) A + m log2 R, which of 2^10 clients with 2^20 numbers is 1.73 times m 16 bits
    zero = torch.zeros(n, dtype=torch.int64)
    _, went = exchange(secure(numbers=m), Federation(), torch.arange(n), zero, Load(zero, zero), 0.0, KEY, KEY)
    assert went is not None
    each = 8 * (went.bytes_up + went.bytes_down) / n
    assert each == 2 * n * 256 + (5 * n - 4) * 256
    width = bits + (n - 1).bit_length()  # of R = n (2^16 - 1) + 1, unsigned
    assert (each + m * width) / (m * bits) == pytest.approx(factor, abs=0.006)


@given(n=st.integers(1, 40), half=st.integers(1, 12), seed=st.integers(0, 99), gone=st.sets(st.integers(0, 39)))
def test_neighbours_are_mutual_and_as_many_for_all(n, half, seed, gone):
    there = torch.ones(n, dtype=torch.bool)
    there[[g for g in gone if g < n]] = False
    near, k = neighbours(there, 2 * half, rng.key(seed)), min(2 * half, int(there.sum()) - 1)
    if near.ring is None:
        assert k == int(there.sum()) - 1
        assert (near.among(there) == int(there.sum())).all()
        return
    assert (near.size, (near.among(there)[there] == k + 1).all()) == (k + 1, True)
    rings = {u: set(near.ring[u].tolist()) for u in names(there)}
    assert all(len(others) == k and u not in others for u, others in rings.items())
    assert all(u in rings[v] for u, others in rings.items() for v in others)
    some = rng.bernoulli(rng.key(seed + 1), 0.5, n) & there
    for u, others in rings.items():
        assert int(near.among(some)[u]) == sum(bool(some[v]) for v in {u, *others})


def test_with_neighbours_it_is_void_where_one_neighbourhood_has_too_few():
    aborts, total = 0, 0
    for seed in range(60):
        how = secure(neighbours=4, threshold=0.8, dropout={"unmasking": 0.1})
        _, went = happen(how, Federation(devices=Fixed((1.0,) * 20)), 20, key=rng.key(seed))
        assert (went.threshold, went.neighbours.size, bool(went.masked.all())) == (4, 5, True)
        fewest = min(int(went.unmasking[torch.tensor([u, *went.neighbours.ring[u].tolist()])].sum()) for u in range(20))
        assert (went.aborted is not None) == (fewest < 4)
        up = 20 * (2 * 32 + 4 * 2 * 32) + int(went.unmasking.sum()) * 5 * 32
        assert went.bytes_up == up + (20 * how.message_bytes if went.aborted else 0)
        assert went.bytes_down == 20 * 4 * (2 * 32 + 2 * 32)
        aborts, total = aborts + (went.aborted is not None), total + int(went.unmasking.sum())
    assert 10 < aborts < 50
    assert 0.85 < total / 1200 < 0.95


@pytest.mark.parametrize(("at", "field"), [("shares", "shared"), ("masked", "masked"), ("unmasking", "unmasking")])
def test_clients_drop_out_at_a_message_as_often_as_they_are_to(at, field):
    how = secure(threshold=0.01, dropout={at: 0.3})
    _, went = happen(how, Federation(devices=Fixed((1.0,) * 4000)), 4000)
    order = ["advertised", "shared", "masked", "unmasking"]
    counts = [int(getattr(went, f).sum()) for f in order]
    place = order.index(field)
    assert counts[:place] == [4000] * place
    assert counts[place] == pytest.approx(2800, abs=90)
    assert len(set(counts[place:])) == 1


def test_sums_are_lost_as_often_as_a_binomial_law_says():
    how, lost = secure(threshold=0.7, dropout={"masked": 0.2}), 0
    federation = Federation(devices=Fixed((1.0,) * 20))
    for seed in range(300):
        _, went = happen(how, federation, 20, key=rng.key(seed))
        lost += went.aborted is not None
    exact = sum(math.comb(20, i) * 0.8**i * 0.2 ** (20 - i) for i in range(14))  # 14 parts are needed
    assert lost / 300 == pytest.approx(exact, abs=0.05)


def test_messages_take_their_time_on_the_link_and_masks_on_the_processor():
    # 8 Mbit/s either way are 1e6 bytes a second; a latency of 0.1 s; 1e9 operations a second
    one = Hardware.of(1.0, 8.0, 8.0, 0.1)
    devices = HeterogeneousDevices(Assigned(Hardware(*(v.expand(3) for v in one))))
    how = secure(numbers=10_000, mask_flop=50.0)
    ones = torch.ones(3, dtype=torch.int64)
    load = Load(2 * ones, 10 * ones, bytes_down=40_000.0, bytes_up=40_000.0, flop=1e6)
    answers, _ = happen(how, Federation(devices=devices), 3, load)
    keys, parts = 0.2 + 64e-6, 0.2 + 2 * 64e-6 + 2 * 64e-6
    masks = 10_000 * 3 * 50 / 1e9
    work = 0.2 + 0.04 + how.message_bytes / 1e6 + 10 * 1e6 / 1e9 + masks
    assert answers.duration_s == pytest.approx(keys + parts + work + 0.2 + 3 * 32e-6)


def test_a_deadline_is_of_the_work_and_who_is_late_is_as_who_has_gone():
    devices = Fixed((1.0, 1.0, 1.0, 9.0))
    federation = Federation(devices=devices, policy=Deadline(2.0))
    answers, went = happen(secure(), federation, 4)
    assert (names(went.shared), names(went.masked), went.rebuilt) == ([0, 1, 2, 3], [0, 1, 2], 1)
    assert answers.duration_s == 9.0 + 9.0 + 2.0 + 1.0


def test_without_it_nothing_changes():
    clients, zero = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    load = Load(zero + 1, zero + 1)
    found, went = exchange(None, SIX, clients, zero, load, 0.0, KEY, KEY)
    assert went is None
    for a, b in zip(found, respond(SIX, clients, zero, load, 0.0, KEY, KEY), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_devices_that_fail_do_so_between_messages_too():
    fleet = Federation(devices=Fixed((1.0,) * 3000), hazard=0.2)
    _, went = happen(secure(threshold=0.01), fleet, 3000)
    counts = [int(w.sum()) for w in (went.advertised, went.shared, went.masked, went.unmasking)]
    for before, after in zip([3000, *counts], counts, strict=False):
        assert after / before == pytest.approx(0.8187, abs=0.035)
