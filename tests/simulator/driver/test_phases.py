"""What becomes of the clients of a phase, against a simulation of its events one by one."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.devices import Load, Times
from fedfleet.simulator.fleet.policies import Deadline, First, WaitAll
from fedfleet.simulator.fleet.responses import Fate, Federation, respond


@dataclass(frozen=True)
class Given:
    """Devices and an availability as listed: seconds a step, and the stretches of time each client is offline."""

    step_s: tuple[float, ...]
    offline: tuple[tuple[float, float], ...]

    def times(self, key, clients, load):
        return Times(
            torch.full((len(clients),), 0.5, dtype=torch.float64),
            torch.tensor(self.step_s, dtype=torch.float64)[clients],
        )

    def online(self, key, clients, seconds):
        gone = torch.tensor(self.offline, dtype=torch.float64)[clients]
        return ~((gone[:, 0] <= seconds) & (seconds < gone[:, 1]))


def one_by_one(model, steps, at_s, count, deadline, partial):
    """Play the phase as a list of events; return fates, moments and when the server stops listening."""
    fates, moments, events = {}, {}, []
    for c, each in enumerate(model.step_s):
        low, high = model.offline[c]
        if low <= at_s < high:
            fates[c], moments[c] = Fate.OFFLINE, 0.0
            continue
        done = steps
        while partial and done > 1 and 0.5 + each * done > deadline:
            done -= 1
        if partial and 0.5 + each * done > deadline:
            done = steps
        moments[c] = 0.5 + each * done
        fails = low <= at_s + moments[c] < high
        events.append((moments[c], c, fails))
    outstanding, heard, closed = len(events), 0, None if events else 0.0
    for moment, c, fails in sorted(events):
        if closed is None and deadline is not None and moment > deadline:
            closed = deadline
        fates[c] = Fate.FAILED if fails else Fate.LATE
        if closed is None and not fails and heard < count:
            fates[c] = Fate.HEARD
            heard += 1
        outstanding -= 1
        if closed is None and (heard == count or outstanding == 0):
            closed = moment
    return fates, moments, closed


halves = st.integers(0, 12).map(lambda i: i / 2)


@given(
    clients=st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 3.0]), halves, halves), min_size=1, max_size=8),
    steps=st.integers(1, 3),
    at_s=st.sampled_from([0.0, 1.0, 2.5]),
    count=st.sampled_from([1, 2, 5, 100]),
    deadline=st.sampled_from([None, 0.25, 1.25, 2.75, 50.0]),
    partial=st.booleans(),
)
def test_a_phase_goes_as_its_events_do(clients, steps, at_s, count, deadline, partial):
    model = Given(tuple(c[0] for c in clients), tuple((c[1], c[1] + c[2]) for c in clients))
    partial = partial and deadline is not None
    policy = WaitAll() if count == 100 else First(count)
    policy = policy if deadline is None else Deadline(deadline, policy)
    federation = Federation(availability=model, devices=model, policy=policy, partial_work=partial)
    ids = torch.arange(len(clients))
    load = Load(torch.full_like(ids, steps), ids)
    found = respond(federation, ids, torch.zeros_like(ids), load, at_s, rng.key(0), rng.key(1))
    fates, moments, closed = one_by_one(model, steps, at_s, count, deadline, partial)
    assert [Fate(f) for f in found.fate.tolist()] == [fates[c] for c in range(len(clients))]
    assert found.seconds.tolist() == pytest.approx([moments[c] for c in range(len(clients))])
    assert found.duration_s == pytest.approx(closed)


def test_failures_are_exponential_in_time():
    ids = torch.arange(20_000)
    model = Given((2.0,) * len(ids), ((99.0, 99.0),) * len(ids))
    load = Load(torch.ones_like(ids), ids)
    federation = Federation(availability=model, devices=model, hazard=0.4)
    found = respond(federation, ids, torch.zeros_like(ids), load, 0.0, rng.key(2), rng.key(1))
    failed = found.fate == Fate.FAILED
    expected = 1 - 2.718281828 ** (-0.4 * 2.5)
    assert float(failed.double().mean()) == pytest.approx(
        expected, abs=4 * (expected * (1 - expected) / len(ids)) ** 0.5
    )
    assert bool((found.seconds[failed] < 2.5).all())
    assert bool((found.seconds[~failed] == 2.5).all())
    half = float((found.seconds[failed] < 1.25).double().mean())  # P(T < 1.25 | T < 2.5)
    assert half == pytest.approx((1 - 2.718281828**-0.5) / expected, abs=0.02)
