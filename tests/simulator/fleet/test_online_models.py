"""Models of availability without a file: their laws, and that answers depend on nobody else's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.availability import Availability, Bernoulli
from fedfleet.simulator.fleet.online.diurnal import Diurnal
from fedfleet.simulator.fleet.online.markov import LEVELS, SPAN, Markov
from fedfleet.simulator.fleet.online.random_rate import RandomRate

CLIENTS = 40_000
PHASE = rng.key(99)


def ask(model: Availability, clients: Tensor, at: float | Tensor, key: rng.Key = PHASE) -> Tensor:
    return model.online(key, clients, torch.as_tensor(at, dtype=torch.float64).expand(len(clients)))


def near(found: Tensor, chance: float, of: int = CLIENTS) -> bool:
    """Whether a share of independent draws is within 4.5 standard deviations of its chance."""
    return abs(float(found.double().mean()) - chance) <= 4.5 * math.sqrt(chance * (1 - chance) / of)


# Random rate


def test_the_rate_of_a_phase_is_uniform_above_low():
    model = RandomRate(0.3, 0.9)
    rates = model.rate(rng.fold(PHASE, torch.arange(4000)))
    assert (rates > 0.3).all()
    assert (rates <= 0.9).all()
    cells = ((rates - 0.3) / 0.06).long().clamp(max=9).bincount(minlength=10)
    assert float(((cells - 400) ** 2 / 400).sum()) < 28  # chi-square, 9 degrees: 1e-3


def test_clients_are_independent_given_the_rate_and_drawn_afresh_in_each_phase():
    model, clients = RandomRate(0.2, 0.6), torch.arange(CLIENTS)
    seen = [ask(model, clients, 0.0, rng.fold(PHASE, i)) for i in range(3)]
    rates = [float(model.rate(rng.fold(PHASE, i))) for i in range(3)]
    assert len(set(rates)) == 3
    for online, rate in zip(seen, rates, strict=True):
        assert near(online, rate)
    assert near(seen[0] & seen[1], rates[0] * rates[1])
    assert torch.equal(ask(model, clients, 7.0), ask(model, clients, 0.0))  # the same at invitation and at answer


def test_random_rate_with_equal_ends_is_bernoulli():
    clients = torch.arange(1000)
    assert torch.equal(ask(RandomRate(0.7, 0.7), clients, 0.0), ask(Bernoulli(0.7), clients, 0.0))
    assert ask(RandomRate(1.0, 1.0), clients, 0.0).all()


# Markov


MARKOV = Markov(rng.key(1), mean_on_s=30.0, mean_off_s=10.0)
RATE = 1 / 30 + 1 / 10
END = SPAN / RATE  # of the first span


@pytest.mark.parametrize("at", [0.0, 1.0, 17.3, END / 2, END, 3.7 * END, 1e6])
def test_the_share_online_is_stationary(at):
    assert near(ask(MARKOV, torch.arange(CLIENTS), at), 0.75)


@pytest.mark.parametrize("start", [0.0, 11.1, END / 2, END - 5.0, 5 * END - 0.01], ids="{:.6g}".format)
@pytest.mark.parametrize("lag", [0.03, 0.7, 5.0, 10.0, 40.0])
def test_transitions_follow_the_closed_form(start, lag):
    """Also where a bound between two independent spans lies in the middle."""
    clients = torch.arange(CLIENTS)
    before, after = ask(MARKOV, clients, start), ask(MARKOV, clients, start + lag)
    kept = math.exp(-RATE * lag)
    on = int(before.sum())
    assert near(after[before], 0.75 + 0.25 * kept, on)
    assert near(after[~before], 0.75 * (1 - kept), CLIENTS - on)


def test_ends_of_a_span_may_be_drawn_apart():
    assert 1 + math.exp(-SPAN) == 1


def test_three_moments_are_markov():
    """Given the state in the middle, the past says nothing of the future."""
    clients = torch.arange(4 * CLIENTS)
    past, now, later = (ask(MARKOV, clients, t) for t in (END - 6.0, END - 2.0, END + 3.0))
    kept = math.exp(-RATE * 5.0)
    for a, b in itertools.product((False, True), repeat=2):
        chosen = (past == a) & (now == b)
        assert near(later[chosen], 0.75 + (b - 0.75) * kept, int(chosen.sum()))


def test_stretches_are_exponential():
    """Brute force: on a fine grid, the stretches of a long path have the means and the coefficient of variation of the law."""
    step = 0.05
    at = torch.arange(0, 40_000, step, dtype=torch.float64)
    path = MARKOV.online(PHASE, torch.full((len(at),), 5), at).numpy()
    change = np.flatnonzero(np.diff(path)) + 1
    lengths, states = np.diff(change) * step, path[change[:-1]]
    for state, mean in ((True, 30.0), (False, 10.0)):
        mine = lengths[states == state]
        assert abs(mine.mean() - mean) < 4 * mean / math.sqrt(len(mine))
        assert abs(mine.std() / mine.mean() - 1) < 0.12


def test_a_path_is_the_same_in_any_order_and_company():
    clients = torch.arange(500) % 50
    at = rng.uniform(rng.key(3), 500, torch.float64) * 3 * END
    whole = MARKOV.online(PHASE, clients, at)
    order = rng.permutation(rng.key(4), 500)
    assert torch.equal(MARKOV.online(rng.key(8), clients[order], at[order]), whole[order])
    alone = [bool(MARKOV.online(PHASE, clients[i : i + 1], at[i : i + 1])) for i in range(100)]
    assert alone == whole[:100].tolist()
    assert not torch.equal(Markov(rng.key(2), 30.0, 10.0).online(PHASE, clients, at), whole)


def test_moments_are_rounded_down_to_the_grid():
    cell = END * 2.0**-LEVELS
    clients = torch.arange(2000)
    for n in (0, 5, 2**21, 2**LEVELS - 1):
        assert torch.equal(ask(MARKOV, clients, (n + 0.1) * cell), ask(MARKOV, clients, (n + 0.9) * cell))


@given(on=st.floats(1e-3, 1e12), off=st.floats(1e-3, 1e12), at=st.floats(0, 1e9))
def test_markov_takes_every_mean(on, off, at):
    online = ask(Markov(rng.key(6), on, off), torch.arange(2000), at)
    share = on / (on + off)
    assert abs(float(online.double().mean()) - share) <= 6 * math.sqrt(share * (1 - share) / 2000) + 0.01


@pytest.mark.parametrize("model", [MARKOV, Diurnal(rng.key(1), zones=torch.zeros(1, dtype=torch.float64))], ids=type)
def test_neighbouring_clients_are_independent(model):
    online = ask(model, torch.arange(CLIENTS), 12_345.6).double()
    for gap in (1, 2, 64):
        both = torch.stack([online[:-gap], online[gap:]])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 4.5 / math.sqrt(CLIENTS)


# Diurnal


def diurnal(**given: Any) -> Diurnal:
    zones = torch.tensor(given.pop("zones", [0.0]), dtype=torch.float64)
    return Diurnal(rng.key(7), zones=zones, **given)


@pytest.mark.parametrize("hour", [0.0, 2.0, 8.0, 14.0, 23.9, 50.0])
def test_the_share_online_follows_the_cosine(hour):
    chance = 0.5 + 0.3 * math.cos(2 * math.pi * (hour - 2) / 24)
    assert near(ask(diurnal(), torch.arange(CLIENTS), hour * 3600), chance)


def test_the_wave_is_cut_off():
    always = diurnal(mean=0.8, amplitude=0.7, peak_hour=12.0)
    assert ask(always, torch.arange(1000), 12 * 3600.0).all()
    assert near(ask(always, torch.arange(CLIENTS), 0.0), 0.1)
    seldom = diurnal(mean=-0.2, amplitude=0.5, peak_hour=12.0)
    assert not ask(seldom, torch.arange(1000), 0.0).any()
    assert near(ask(seldom, torch.arange(CLIENTS), 12 * 3600.0), 0.3)


@pytest.mark.parametrize("peak", [0.0, 2.0, 12.0, 23.0])
def test_one_stretch_a_day_around_the_peak(peak):
    model = diurnal(mean=0.4, amplitude=0.5, peak_hour=peak, zones=[-7.0], day_s=1440.0)  # nobody stays on all day
    minutes = torch.arange(3 * 1440)
    peaks = (peak * 60 + 7 * 60) % 1440 + 1440 * torch.arange(3)
    lengths = set()
    for client in range(40):
        path = model.online(PHASE, torch.full_like(minutes, client), minutes.double()).int()
        starts = (path.diff() == 1).nonzero().flatten() + 1
        ends = (path.diff() == -1).nonzero().flatten() + 1
        for start in starts.tolist():
            if (after := ends[ends > start]).numel():
                end = int(after[0])
                inside = [p for p in peaks.tolist() if start <= p < end]
                assert len(inside) == 1, (start, end)
                assert abs((start + end) / 2 - inside[0]) <= 1.5  # symmetric
                lengths.add(end - start)
        assert len(starts) <= 4  # a stretch may be cut in two by the bounds of the 3 days
    assert len(lengths) > 40  # a threshold of its own for each client and day


def test_time_zones():
    clients, noon = torch.arange(CLIENTS), 12 * 3600.0
    given_zones = diurnal(mean=0.0, amplitude=1.0, peak_hour=12.0, zones=[0.0, 12.0, -6.0])
    hours = given_zones.zone(clients)
    assert hours.unique().tolist() == [-6.0, 0.0, 12.0]
    online = ask(given_zones, clients, noon)
    assert online[hours == 0].all()
    assert not online[hours == 12].any()
    for zone in (-6.0, 0.0, 12.0):
        assert near(hours == zone, 1 / 3)
    uniform = Diurnal(rng.key(7)).zone(clients)
    assert near(uniform < 6, 0.25)
    assert (uniform >= 0).all()
    assert (uniform < 24).all()
    assert near(ask(Diurnal(rng.key(7)), clients, noon), 0.5)  # all hours of the day at once


def test_a_day_of_another_length():
    clients = torch.arange(500)
    hours, minutes = diurnal(), diurnal(day_s=86400.0 / 60)
    assert torch.equal(ask(hours, clients, 7200.0), ask(minutes, clients, 120.0))
