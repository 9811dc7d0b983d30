"""Processes in rounds: their laws, the values of the specification, and that answers depend on nobody else's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.availability import InRounds, chances
from fedfleet.simulator.fleet.online import rates, rounds
from fedfleet.simulator.fleet.online.chain import SPAN, chain, levels
from fedfleet.simulator.fleet.online.rounds import Cyclic, Independent, MarkovRounds, Outages, Turns, Waves
from tests.parts import slow_but

CLIENTS = 20_000
KEY, PHASE = rng.key(3), rng.key(99)
OWN = rates.uniform(rng.key(8), 0.05, 1.0)
HALF = torch.tensor([0.8, 0.5, 0.9], dtype=torch.float64)
PROCESSES: dict[str, Any] = {
    "independent": Independent(KEY, OWN), "markov": MarkovRounds(KEY, OWN, 0.05), "quick markov": MarkovRounds(KEY, OWN, 0.5),
    "cyclic": Cyclic(KEY, OWN, 100), "sine": Waves(KEY, OWN, rounds.sine(0.3, 20), 20),
    "interleaved": Waves(KEY, OWN, rounds.sine(0.3, 20), 20, 0.1), "staircase": Waves(KEY, OWN, rounds.staircase(0.4, 10), 20),
    "f3ast": Waves(KEY, OWN, rounds.f3ast(0.4, 0.5, 24), 24), "outages": Outages(KEY, OWN, lambda c: c // 2 % 3, HALF, 0.7),
    "blocks": Turns(KEY, CLIENTS, (7,) * 5, 7), "alternating": Turns(KEY, CLIENTS, (10, 3)),
}  # fmt: skip
FIXED = ("blocks", "alternating")
"""Processes with which all clients of a group are online together."""


def on(process: Any, clients: Tensor, round: int) -> Tensor:
    return process.during(round).online(PHASE, clients, torch.zeros(len(clients), dtype=torch.float64))


def likely(process: Any, clients: Tensor, round: int) -> Tensor:
    none = torch.zeros(len(clients), dtype=torch.float64)
    return process.during(round).chance(clients, none, none)


def near(found: Tensor, p: Tensor | float) -> bool:
    """Whether independent draws sum to what their chances say, within 4 standard deviations."""
    p = torch.as_tensor(p, dtype=torch.float64).expand(len(found))
    return abs(float((found.double() - p).sum())) <= 4 * float((p * (1 - p)).sum().sqrt()) + 1e-9


@pytest.mark.parametrize("name", [n for n in PROCESSES if n not in (*FIXED, "outages")])
@pytest.mark.parametrize("round", [0, 15, 1023, 10**12 + 3])
def test_clients_are_online_with_their_chance_in_any_round(name, round):
    process, clients = PROCESSES[name], torch.arange(CLIENTS)
    p, found = likely(process, clients, round), on(process, clients, round)
    by_rate = OWN(clients).argsort()
    for part in by_rate.split(CLIENTS // 4):  # of small rates and of large ones
        assert near(found[part], p[part])


@pytest.mark.parametrize("name", slow_but(PROCESSES, "independent", "markov", "cyclic", "interleaved", "outages"))
def test_the_long_run_is_the_mean_chance_and_the_share_of_rounds(name):
    process, few = PROCESSES[name], torch.arange(0, CLIENTS, CLIENTS // 60)
    period = {"f3ast": 24, "blocks": 35, "alternating": 13}.get(name, 20)
    each = torch.stack([process.during(t).chance(few, few, few) for t in range(period)])
    assert isinstance(process, InRounds)
    assert process.varies == bool((each != each[0]).any())
    long_run = process.during(3).long_run(few)
    torch.testing.assert_close(long_run, each.mean(0), rtol=1e-12, atol=1e-15)
    length = {"cyclic": 505, "blocks": 700, "alternating": 650}.get(name, 600)
    shares = torch.stack([on(process, few, t) for t in range(length)]).double().mean(0)
    if name in FIXED:
        torch.testing.assert_close(shares, long_run)
        return
    spread = (long_run * (1 - long_run)).clamp(min=1e-6) / length
    if "markov" in name:  # lag correlations r^h make means of many rounds less sure
        a, b = process.steps(long_run)
        spread *= (2 - a - b) / (a + b)
    elif name == "outages":
        spread *= 1 + 2 * 0.7 / 0.3
    z = (shares - long_run) / spread.sqrt()
    assert float(z.abs().max()) < 4.5
    if name != "outages":
        assert abs(float(z.mean())) < 4 / math.sqrt(len(few))


@pytest.mark.parametrize("name", PROCESSES)
def test_an_answer_depends_on_no_company_order_phase_or_moment(name):
    process, clients = PROCESSES[name], torch.arange(64) * 500
    for t in (41, 0, 10**6 + 1):
        whole = on(process, clients, t)
        assert torch.equal(on(process, clients.flip(0), t).flip(0), whole)
        assert [bool(on(process, clients[i : i + 1], t)) for i in range(64)] == whole.tolist()
        later = process.during(t).online(rng.fold(PHASE, clients), clients, torch.arange(64).double() * 1e4)
        assert torch.equal(later, whole)


def test_ten_billion_clients_and_late_rounds_cost_no_more(subtests):
    many, few = 10**10, torch.tensor([0, 9_999_999_999, 5_000_000_000])
    for name, process in PROCESSES.items():
        if isinstance(process, Turns):
            process = Turns(KEY, many, process.lengths)
        with subtests.test(name):
            assert len(on(process, few, 10**15)) == 3
    assert Turns(KEY, many, (1,) * 5).group(few).tolist() == [0, 4, 2]


# Chains


@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize(
    ("p", "a", "start"), [(0.3, 0.05, 1021), (0.9, 0.2, 3), (0.04, 0.05, 62), (0.5, 0.5, 1), (0.6, 0.3, 126)]
)
def test_steps_of_a_chain_follow_the_closed_form(p, a, start, lag):
    """Also over the bound between two spans, and where a client never stays."""
    process, clients = MarkovRounds(KEY, rates.constant(p), a), torch.arange(CLIENTS)
    up, down = (float(x) for x in process.steps(torch.tensor([p], dtype=torch.float64)))
    r = 1 - up - down
    before, after = on(process, clients, start), on(process, clients, start + lag)
    assert near(after[before], p + (1 - p) * r**lag)
    assert near(after[~before], p - p * r**lag)
    if down == 1 and lag == 1:
        assert not (before & after).any()


def test_three_rounds_of_a_chain_are_markov():
    """Given the present, the past says nothing of the future."""
    process, clients = MarkovRounds(KEY, rates.constant(0.4), 0.1), torch.arange(2 * CLIENTS)
    past, now, later = (on(process, clients, t) for t in (509, 511, 514))
    a, b = (float(x) for x in process.steps(torch.tensor([0.4], dtype=torch.float64)))
    for then, present in itertools.product((False, True), repeat=2):
        chosen = (past == then) & (now == present)
        assert near(later[chosen], 0.4 + (present - 0.4) * (1 - a - b) ** 3)


def test_halvings_reach_from_independent_ends_to_single_rounds():
    for lag in (0.5, 0.95, 0.999999):
        n = levels(lag)
        assert lag ** (2**n) <= math.exp(-SPAN) * (1 + 1e-9) < lag ** (2 ** (n - 1)) * (1 + 1e-6)
    assert levels(0.0) == levels(1e-18) == 0
    clients, full = torch.arange(CLIENTS), lambda x: torch.full((CLIENTS,), x, dtype=torch.float64)
    for r in (-0.4, 0.9):  # alternating chains and sticky ones, whatever the halvings
        states = [chain(KEY, clients, t, full(0.5), full(r), 9) for t in (700, 701)]
        assert near(states[0] == states[1], (1 + r) / 2)


@pytest.mark.parametrize(
    ("p", "a", "b", "lag", "variance"),
    [(0.1, 0.05, 0.45, 0.5, 270), (0.5, 0.05, 0.05, 0.9, 38), (0.04, 0.0416667, 1, -0.0416667, 552)],
)
def test_steps_have_the_values_of_the_specification(p, a, b, lag, variance):
    found = [float(x) for x in MarkovRounds(KEY, OWN, 0.05).steps(torch.tensor([p], dtype=torch.float64))]
    assert found == pytest.approx([a, b], abs=5e-8)
    a, b = found
    assert 1 - a - b == pytest.approx(lag, abs=5e-8)
    assert a / (a + b) == pytest.approx(p)
    assert 1 + b * (2 / a + (2 - a) / a**2) - 1 / p**2 == pytest.approx(variance)


@pytest.mark.slow
def test_intervals_between_participations_have_the_mean_and_variance_of_the_chain():
    process = MarkovRounds(KEY, rates.constant(0.5), 0.05)
    path = torch.stack([on(process, torch.arange(200), t) for t in range(900)]).T
    gaps = torch.cat([mine.nonzero().flatten().diff() for mine in path]).double()
    assert float(gaps.mean()) == pytest.approx(2, rel=0.06)
    assert float(gaps.var()) == pytest.approx(38, rel=0.15)
    stretches = path.int().diff().abs().sum() / 200 / 899  # a change in either direction
    assert float(stretches) == pytest.approx(2 * 0.5 * 0.05, rel=0.06)


def test_rates_of_nought_and_one_are_kept():
    ends: Any = lambda clients: (clients % 2).double()  # noqa: E731
    for process in (MarkovRounds(KEY, ends, 0.05), Independent(KEY, ends)):
        for t in (0, 5, 1000):
            assert torch.equal(on(process, torch.arange(100), t), torch.arange(100) % 2 == 1)


# Cycles and turns


@pytest.mark.parametrize(("p", "lengths"), [(0.1, (10, 90)), (0.004, (1, 99)), (0.333, (33, 67)), (1.0, (100, 1))])
def test_cycles_have_the_lengths_of_the_specification(p, lengths):
    process = Cyclic(KEY, rates.constant(p), 100)
    few = torch.arange(20)
    assert tuple(float(x[0]) for x in process.lengths(few)) == lengths
    path = torch.stack([on(process, few, t) for t in range(3 * sum(lengths))])
    assert path[: sum(lengths)].sum(0).eq(lengths[0]).all()
    assert torch.equal(path[sum(lengths) :], path[: -sum(lengths)])
    assert path.int().diff(dim=0).abs().sum(0).le(6).all()  # in one stretch
    none = torch.zeros(20, dtype=torch.float64)
    assert chances(process, few, none, none, 7).tolist() == pytest.approx([lengths[0] / sum(lengths)] * 20)


def test_phases_are_uniform_and_start_off_means_off():
    clients = torch.arange(CLIENTS)
    anywhere, off = (Cyclic(KEY, rates.constant(0.1), 100, start) for start in (False, True))
    assert near(on(anywhere, clients, 0), 0.1)
    assert near(on(off, clients, 0), 1 / 90)
    assert near(on(off, clients, 9), 10 / 90)
    assert near(on(off, clients, 95), 4 / 90)  # those that came first have gone, and nobody is back yet
    assert not on(off, clients, 99).any()
    firsts = torch.stack([on(off, clients[:9000], t) for t in range(100)]).int().argmax(0).bincount(minlength=90)
    assert float(((firsts - 100) ** 2 / 100).sum()) < 144  # chi-square, 89 degrees: 2e-4
    assert len(firsts) == 90


def test_groups_take_turns():
    process = Turns(KEY, 11, (3, 1, 2))
    who = [on(process, torch.arange(11), t).nonzero().flatten().tolist() for t in range(7)]
    first, second, third = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]
    assert who == [first] * 3 + [second] + [third] * 2 + [first]
    assert process.during(0).long_run(torch.tensor([0, 4, 10])).tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3])
    cut = [Turns(rng.key(seed), 5, (4,) * 5, 4) for seed in range(400)]
    lengths = torch.tensor([next(t for t in range(9) if not on(x, torch.tensor([0]), t)) for x in cut])
    assert lengths.bincount(minlength=5).tolist()[0] == 0
    assert float(((lengths.bincount(minlength=5)[1:] - 100) ** 2 / 100).sum()) < 17  # chi-square, 3 degrees: 7e-4


# Waves


def test_waves_have_the_values_of_the_specification():
    one: Any = torch.zeros(1, dtype=torch.int64)
    sine, staircase, wave = rounds.sine(0.3, 20), rounds.staircase(0.4, 10), rounds.f3ast(0.4, 0.5, 24)
    assert float(Waves(KEY, rates.constant(0.9), sine, 20).long_run(one)) == pytest.approx(0.63)
    interleaved = Waves(KEY, rates.constant(0.13), sine, 20, 0.1)
    assert float(interleaved.long_run(one)) == pytest.approx(0.0532618154, abs=1e-10)
    assert sum(float(interleaved.likely(one, t)) > 0 for t in range(20)) == 9
    assert float(Waves(KEY, rates.constant(0.6), staircase, 20).long_run(one)) == pytest.approx(0.42)
    assert float(Waves(KEY, rates.constant(0.6), wave, 24).long_run(one)) == pytest.approx(0.3)
    assert [sine(t) for t in (0, 5, 15)] == pytest.approx([0.7, 1.0, 0.4])
    assert [staircase(t) for t in (0, 9, 10, 19, 20)] == [1, 1, 0.4, 0.4, 1]
    assert [wave(t) for t in (0, 23)] == pytest.approx([0.5, 0.5])
    assert max(map(wave, range(24))) == pytest.approx(0.5 + 0.4 * math.sin(2 * math.pi * 6 / 23))
    assert float(interleaved.likely(one, 5)) == pytest.approx(0.13)
    assert float(interleaved.likely(one, 25)) == pytest.approx(0.13)


# Outages


VARIANCES = {
    "outages": {"completed": 0.8512, "apart": 3.8541667, "alike": 1.0972222},
    "independent": {"completed": 0.6976, "apart": 3.9791667, "alike": 1.0347222},
}


@pytest.mark.parametrize("name", VARIANCES)
def test_outages_have_the_moments_of_the_specification(name):
    """Four clients with p = (.9, .5, .3, .1), 5,000 times side by side: two regions up 0.8 of the time, or none and 0.8 p."""
    p = torch.tensor([0.9, 0.5, 0.3, 0.1], dtype=torch.float64)
    up, clients = torch.full((2 * CLIENTS,), 0.8, dtype=torch.float64), torch.arange(CLIENTS)
    process: Any = Outages(KEY, lambda c: p[c % 4], lambda c: c // 2, up, 0.7)
    if name == "independent":
        process = Independent(KEY, lambda c: 0.8 * p[c % 4])
    chance = likely(process, clients[:4], 5)
    assert chance.tolist() == pytest.approx([0.72, 0.4, 0.24, 0.08])
    found = on(process, clients, 5).double().view(-1, 4)
    values = torch.tensor([[0.0, 1, 4, -1], [1.0, 1, 1, 1]], dtype=torch.float64)
    statistics = {
        "completed": (found.sum(1), 1.44),
        "apart": (found @ (values[0] / (4 * chance)), 1.0),
        "alike": (found @ (values[1] / (4 * chance)), 1.0),
    }
    for what, (drawn, mean) in statistics.items():
        n, variance = len(drawn), VARIANCES[name][what]
        assert abs(float(drawn.mean()) - mean) < 4 * math.sqrt(variance / n)
        fourth = float((drawn - mean).pow(4).mean())
        assert abs(float((drawn - mean).square().mean()) - variance) < 4 * math.sqrt((fourth - variance**2) / n)


@pytest.mark.parametrize("lag", [1, 4])
def test_regions_stay_as_they_are_with_their_correlation(lag):
    regions = torch.arange(CLIENTS)
    process = Outages(KEY, rates.constant(1.0), lambda c: c, torch.full((CLIENTS,), 0.8, dtype=torch.float64), 0.7)
    before, after = (process.regions_up(regions, t) for t in (61, 61 + lag))
    assert near(before, 0.8)
    assert near(after[before], 0.8 + 0.2 * 0.7**lag)
    assert near(after[~before], 0.8 - 0.8 * 0.7**lag)
