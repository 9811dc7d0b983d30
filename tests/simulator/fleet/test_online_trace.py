"""Availability from a trace against a search by hand, whatever the intervals, periods and moments."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.online.trace import Intervals, Trace

PHASE = rng.key(0)
Lists = list[list[tuple[float, float]]]


def intervals(devices: Lists, periods: list[float]) -> Intervals:
    flat = [pair for mine in devices for pair in mine]
    first = torch.tensor([0, *(len(mine) for mine in devices)]).cumsum(0)
    start, end = torch.tensor(flat, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return Intervals(first, start.contiguous(), end.contiguous(), torch.tensor(periods, dtype=torch.float64))


def by_hand(mine: list[tuple[float, float]], period: float, at: float) -> bool:
    return any(start <= math.fmod(at, period) < end for start, end in mine)


@st.composite
def devices(draw: st.DrawFn) -> Lists:
    """Devices with up to 9 intervals between whole numbers below 40, some touching."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        ends = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=10)))
        pairs = list(itertools.pairwise(ends))
        chosen = draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
        chosen[draw(st.integers(0, len(pairs) - 1))] = True
        found.append([(float(a), float(b)) for (a, b), keep in zip(pairs, chosen, strict=True) if keep])
    return found


MOMENTS = torch.arange(0, 100, 0.5, dtype=torch.float64)


@given(lists=devices(), own=st.booleans())
def test_a_client_is_online_in_the_intervals_of_its_device_again_and_again(lists, own):
    periods = [mine[-1][1] + i for i, mine in enumerate(lists)] if own else [41.0]
    numbers = 3 * torch.arange(len(lists)) + 1
    model = Trace(intervals(lists, periods), rng.key(1), numbers)
    for i, mine in enumerate(lists):
        client = torch.full((len(MOMENTS),), int(numbers[i]))
        expected = [by_hand(mine, periods[i if own else 0], t) for t in MOMENTS.tolist()]
        assert model.online(PHASE, client, MOMENTS).tolist() == expected
    mixed = torch.arange(len(MOMENTS)) % len(lists)
    expected = [
        by_hand(lists[i], periods[i if own else 0], t) for i, t in zip(mixed.tolist(), MOMENTS.tolist(), strict=True)
    ]
    assert model.online(rng.key(5), numbers[mixed], MOMENTS).tolist() == expected


def test_clients_that_are_no_device_are_never_online():
    model = Trace(intervals([[(0, 9)], [(0, 9)]], [9]), rng.key(1), torch.tensor([2, 5]))
    online = model.online(PHASE, torch.arange(8), torch.zeros(8, dtype=torch.float64))
    assert online.nonzero().flatten().tolist() == [2, 5]


def test_clients_are_dealt_to_the_devices_evenly_by_the_seed():
    trace = intervals([[(i, i + 1)] for i in range(50)], [50])
    clients = torch.arange(520)
    dealt = Trace(trace, rng.key(1)).device(clients)
    assert sorted(set(dealt.bincount(minlength=50).tolist())) == [10, 11]
    assert not torch.equal(dealt, Trace(trace, rng.key(2)).device(clients))
    assert dealt[:50].tolist() != list(range(50))
    online = Trace(trace, rng.key(1)).online(PHASE, clients, dealt + 0.5)
    assert online.all()


def test_a_shift_is_a_clients_own_and_uniform_over_the_period():
    trace = intervals([[(0, 25)], [(5, 20)]], [100, 20])
    model = Trace(trace, rng.key(3), shift=True)
    clients = torch.arange(20_000)
    device = model.device(clients)
    for at in (0.0, 13.0, 1e6):
        online = model.online(PHASE, clients, torch.full((20_000,), at, dtype=torch.float64)).double()
        for number, share in ((0, 0.25), (1, 0.75)):
            mine = online[device == number]
            assert abs(float(mine.mean()) - share) < 4.5 * math.sqrt(share * (1 - share) / len(mine))
    path = model.online(PHASE, torch.full((400,), 6), torch.arange(400).double())  # one client: the same wave, later
    period = 100 if int(device[6]) == 0 else 20
    assert int(path[:period].sum()) == (25 if period == 100 else 15)
    assert torch.equal(path[:-period], path[period:])


@pytest.mark.parametrize("map_direct", [False, True])
def test_a_moment_depends_on_no_company(map_direct):
    trace = intervals([[(0, 4), (6, 7)], [(2, 3)], [(1, 8)]], [8])
    model = Trace(trace, rng.key(3), torch.tensor([0, 4, 9]) if map_direct else None, shift=True)
    clients, at = torch.arange(30) % 10, rng.uniform(rng.key(9), 30, torch.float64) * 30
    whole = model.online(PHASE, clients, at)
    assert [bool(model.online(PHASE, clients[i : i + 1], at[i : i + 1])) for i in range(30)] == whole.tolist()
