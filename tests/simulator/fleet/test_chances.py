"""The chances that models of availability tell, against what ``online`` answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.availability import Always, Bernoulli, chances
from fedfleet.simulator.fleet.devices import Homogeneous, Load
from fedfleet.simulator.fleet.online.correlated import Correlated
from fedfleet.simulator.fleet.online.diurnal import Diurnal
from fedfleet.simulator.fleet.online.markov import Markov
from fedfleet.simulator.fleet.online.random_rate import RandomRate
from fedfleet.simulator.fleet.online.trace import Trace
from fedfleet.simulator.fleet.responses import Federation, Outcome, chance, respond
from tests.refusals import refused
from tests.simulator.fleet.test_online_trace import devices, intervals

CLIENTS, HOUR = 20_000, 3600.0
KEY, ONE_ZONE = rng.key(3), torch.zeros(1, dtype=torch.float64)
TRACE = intervals([[(0, 4), (6, 7)], [(2, 3)], [(1, 8)]], [8])
BY_SIZE = Correlated(lambda clients: (clients % 9).double() / 4 - 1, -0.4, 1.7)
MODELS = {
    "always": Always(), "bernoulli": Bernoulli(0.3), "random_rate": RandomRate(0.2, 0.9), "correlated": BY_SIZE,
    "markov": Markov(KEY, 600.0, 1800.0), "diurnal": Diurnal(KEY), "one zone": Diurnal(KEY, 0.3, 0.6, zones=ONE_ZONE),
    "trace": Trace(TRACE, KEY, shift=True),
}  # fmt: skip


def at(moment: float, size: int = CLIENTS) -> Tensor:
    return torch.full((size,), moment, dtype=torch.float64)


def twice(model: Any, moment: float, lasting: float) -> tuple[Tensor, Tensor]:
    """Who is online at the moment and so much later, in phases of their own, and the chances of it."""
    clients = torch.arange(CLIENTS)
    keys = rng.fold(rng.key(9), clients)
    both = model.online(keys, clients, at(moment)) & model.online(keys, clients, at(moment + lasting))
    return both.double(), model.chance(clients, at(moment), at(lasting))


@pytest.mark.parametrize("name", MODELS)
def test_a_chance_is_how_often_a_client_is_online_when_invited_and_when_asked_again(subtests, name):
    for moment, lasting in ((0.0, 0.0), (2 * HOUR, 60.0), (12.4 * HOUR, 600.0), (13 * HOUR, 2 * HOUR), (7.0, 2.5)):
        both, p = twice(MODELS[name], moment, lasting)
        groups = {"all": torch.ones(CLIENTS, dtype=torch.bool)}
        if p.unique().numel() < CLIENTS / 100:  # then those of one chance can be told from the others
            groups |= {f"{value:.6f}": p == value for value in p.unique().tolist()}
        for group, mine in groups.items():
            with subtests.test(f"{moment:g} s, {lasting:g} s, {group}"):
                spread = float((p[mine] * (1 - p[mine])).sum().sqrt())
                assert abs(float((both - p)[mine].sum())) <= 4 * spread + 1e-9


def test_the_long_run_is_the_mean_over_moments(subtests):
    clients = torch.arange(18).repeat(2000)
    for name, model in MODELS.items():
        with subtests.test(name):
            period = 86400.0 if "zone" in name or name == "diurnal" else 8.0
            moments = ((torch.arange(2000, dtype=torch.float64) + 0.5) * period / 2000).repeat_interleave(18)
            each = model.chance(clients, moments, torch.zeros_like(moments)).view(2000, 18)
            assert model.varies == bool((each != each[0]).any())
            torch.testing.assert_close(model.long_run(clients[:18]), each.mean(0), rtol=1e-5, atol=0)


@given(mean=st.floats(-1, 2), amplitude=st.sampled_from([0.0, 0.1, 0.7, 2.0]))
def test_the_long_run_of_a_day_is_cut_off_as_the_day_is(mean, amplitude):
    model = Diurnal(KEY, mean, amplitude)
    days = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    assert float(model.long_run(torch.arange(1))) == pytest.approx(float(model.share(days).mean()), abs=1e-6)


def test_slow_clients_are_heard_less():
    """The values of the specification: 600 s on and 1800 s off, asked again at once, after 60 s and after 600 s."""
    model: Any = MODELS["markov"]
    found = model.chance(torch.arange(3), at(5.0, 3), torch.tensor([0.0, 60.0, 600.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([0.25, 0.226595, 0.111924], abs=5e-7)


def test_over_all_heard_one_over_the_chance_adds_up_to_the_number_invited(subtests):
    """The chance is of being online when invited, not failing at work, and being online when the answer is ready."""
    clients, key = torch.arange(CLIENTS), rng.key(21)
    copies, load = torch.zeros_like(clients), Load(torch.ones_like(clients), torch.ones_like(clients))
    for name, model in MODELS.items():
        if name in (
            "random_rate",
            "trace",
        ):  # whose clients go on and off together; some of whom are never heard after 60 s
            continue
        for hazard in (0.0, 1 / 600):
            with subtests.test(f"{name}, {hazard:g} failures a second"):
                federation = Federation(availability=model, devices=Homogeneous(60.0, 1.0), hazard=hazard)
                heard = respond(federation, clients, copies, load, 5 * HOUR, key, key).outcome == Outcome.COMPLETED
                p = chance(federation, clients, copies, load, 5 * HOUR, key)
                off = float((heard[p > 0] / p[p > 0]).sum() - (p > 0).sum())
                assert abs(off) <= 4 * float((1 / p[p > 0] - 1).sum().sqrt()) + 1e-6
                assert not heard[p == 0].any()


def test_failures_take_their_share_of_the_chances():
    """exp(-60 / 600) of a client that works 60 s, at one failure in 600 s."""
    two = torch.arange(2)
    load = Load(torch.ones_like(two), torch.ones_like(two))
    federation = Federation(availability=Bernoulli(0.3), devices=Homogeneous(60.0, 0.0), hazard=1 / 600)
    found = chance(federation, two, torch.zeros_like(two), load, 0.0, rng.key(1))
    assert found.tolist() == pytest.approx([0.3 * math.exp(-0.1)] * 2, rel=1e-12)


def test_two_days_have_thresholds_of_their_own():
    """Over the trough between them, which is at 14 h here, the chances of both moments multiply."""
    model: Any = Diurnal(KEY, 0.5, 0.3, zones=ONE_ZONE)
    p, q = (0.5 + 0.3 * math.cos(2 * math.pi * (hour - 2) / 24) for hour in (12.0, 17.0))
    found = model.chance(torch.arange(2), at(12 * HOUR, 2), torch.tensor([5.0, 1.0], dtype=torch.float64) * HOUR)
    assert found.tolist() == pytest.approx([p * q, 0.5 + 0.3 * math.cos(2 * math.pi * 11 / 24)], rel=1e-12)


@given(lists=devices(), own=st.booleans(), lasting=st.integers(0, 200))
def test_the_chance_of_a_trace_is_the_share_of_pairs_of_moments(lists, own, lasting):
    periods = [mine[-1][1] + i for i, mine in enumerate(lists)] if own else [41.0]
    model = Trace(intervals(lists, periods), KEY, 2 * torch.arange(len(lists)))
    clients = torch.arange(2 * len(lists))
    found = model.chance(clients, at(3.0, len(clients)), at(lasting / 2, len(clients)))
    for client in clients.tolist():
        period = periods[client // 2 if own else 0]
        moments = torch.arange(
            0.25, period, 0.5, dtype=torch.float64
        )  # ends are whole, so each stands for its half second
        who = torch.full((len(moments),), client)
        both = model.online(KEY, who, moments) & model.online(KEY, who, moments + lasting / 2)
        assert float(found[client]) == pytest.approx(float(both.double().mean()), abs=1e-9)
    assert found[1::2].eq(0).all()


@dataclass(frozen=True)
class Alternating:
    """A process in rounds: clients with the round's parity are online."""

    def during(self, round: int) -> Any:
        return Correlated(lambda clients: (clients % 2 == round % 2).double() * 2 - 1, 0.0, math.inf)


def test_who_tells_no_chance_or_none_but_nought_is_refused(subtests):
    class Silent:
        def online(self, key, clients, seconds):
            return clients >= 0

    clients, now = torch.tensor([4, 1]), at(0.0, 2)
    rows = {
        "Silent": Silent(), "counts in rounds": Alternating(), "client 1 ": Trace(TRACE, KEY, torch.tensor([0, 4, 9])),
    }  # fmt: skip
    for what, model in rows.items():
        with subtests.test(what):
            assert what in refused(
                lambda model=model: chances(model, clients, now, now, what="correction"), "correction"
            )
    assert chances(Alternating(), clients[:1], now[:1], now[:1], 2).tolist() == [1.0]
    night = Diurnal(KEY, 0.3, 0.6, zones=ONE_ZONE)  # a chance of 0 for now is none for good
    assert chances(night, clients, at(14 * HOUR, 2), now).tolist() == [0.0, 0.0]
