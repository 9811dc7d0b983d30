"""Invariants under any devices: one outcome each, a clock that never goes back, an account that adds up."""

import itertools

import pytest
import torch
from harness import build, digits, flat, records
from hypothesis import given
from hypothesis import strategies as st

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.fleet.availability import Always, Bernoulli
from fedfleet.simulator.fleet.devices import Homogeneous
from fedfleet.simulator.fleet.online.markov import Markov
from fedfleet.simulator.fleet.policies import Deadline, First, Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Federation, Outcome
from fedfleet.simulator.fleet.selection import Oort, Uniform

WORLDS = {task: digits(task, clients=40) for task in ("classification", "auc")}
OPTIONS = {
    "fedavg": ("classification", {"steps": 4, "batch_size": 5}),
    "scaffold": ("classification", {"steps": 4, "batch_size": 5}),
    "fedbuff": ("classification", {"steps": 4, "batch_size": 5, "buffer": 4, "concurrency": 9, "max_staleness": 2}),
    "cdma_ada": ("auc", {"steps": 3, "batch_size": 5}),
}


def play(name, world, federation, rounds=5, **given):
    return list(
        records(
            build(name, world.task, CohortOptions(size=9), **OPTIONS[name][1]),
            world,
            rounds,
            inner="batched",
            federation=federation,
            attempts=200,
            **given,
        )
    )


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(OPTIONS)),
    availability=st.sampled_from([Always(), Bernoulli(0.5), Markov(rng.key(5), 2.0, 1.0)]),
    policy=st.sampled_from([WaitAll(), First(4), Siwer(), Deadline(1.2), Deadline(1.5, First(5))]),
    hazard=st.sampled_from([0.0, 0.3]),
    partial=st.booleans(),
    discount=st.sampled_from([None, 0.5]),
    over_select=st.sampled_from([1.0, 1.4]),
    selection=st.sampled_from([Uniform(), Oort()]),
    seed=st.integers(0, 100),
)
def test_the_account_adds_up(name, availability, policy, hazard, partial, discount, over_select, selection, seed):
    world = WORLDS[OPTIONS[name][0]]
    federation = Federation(
        availability=availability, devices=Homogeneous(1.0, 0.5), policy=policy, hazard=hazard, partial_work=partial
    )
    found = play(
        name,
        world,
        federation,
        seed=seed,
        stale_discount=discount,
        over_select=over_select,
        selection=selection,
        min_responses=2,
    )
    clock, sent = 0.0, {}
    for record in found:
        assert record.started_s == clock
        for p in record.phases:
            assert p.started_s >= clock
            clock = p.started_s + p.responses.duration_s
            c, outcomes = p.counts, p.responses.outcome
            assert len(outcomes) == len(p.clients) == c["invited"] == sum(c[f.name.lower()] for f in Outcome)
            assert [c[f.name.lower()] for f in Outcome] == [int((outcomes == f).sum()) for f in Outcome]
            assert bool((p.responses.seconds >= 0).all())
            assert bool((p.responses.seconds[outcomes == Outcome.COMPLETED] <= p.responses.duration_s + 1e-9).all())
            answers = c["completed"] + c["merged_stale"]  # also of an aborted attempt, which too few have answered
            if answers:
                sent.setdefault(p.phase, (c["floats_up"] / answers, c["bytes_up"] / answers))
                assert sent[p.phase][0] > 0
                assert (c["floats_up"], c["bytes_up"]) == tuple(answers * size for size in sent[p.phase])
            if c["client_steps"]:  # of an aborted attempt nobody computes
                assert c["client_steps"] >= answers
        assert record.virtual_s >= clock
        clock = record.virtual_s


@pytest.mark.parametrize(
    ("name", "discount", "selection"),
    [
        (n, d, s)
        for n, d, s in itertools.product(OPTIONS, [None, 0.5], [Uniform(), Oort()])
        if n != "fedbuff" or d is None
    ],
)
def test_who_is_neither_heard_nor_stale_leaves_no_trace(name, discount, selection):
    world = WORLDS[OPTIONS[name][0]]
    federation = Federation(
        availability=Bernoulli(0.7), devices=Homogeneous(1.0, 1.0), policy=Siwer(0.3, 0.6), hazard=0.3
    )
    given = {"stale_discount": discount, "selection": selection}
    found = play(name, world, federation, rounds=3, **given)
    used: set[int] = set()
    for p in (p for r in found for p in r.phases):
        seen = (p.responses.outcome == Outcome.COMPLETED) | (p.responses.outcome == Outcome.STALE)
        used |= set(p.clients[seen].tolist())
    unheard = sorted(set(range(world.population.size)) - used)
    assert len(unheard) > 5
    x = world.population.data["x"].clone()
    for client in unheard:
        rows = world.population.indices[world.population.offsets[client] : world.population.offsets[client + 1]]
        x[rows] = torch.nan
    spoilt = type(world.population)(
        {**world.population.data, "x": x}, world.population.indices, world.population.offsets, world.population.domain
    )
    again = play(name, type(world)(world.task, spoilt), federation, rounds=3, **given)
    for a, b in zip(found, again, strict=True):
        assert torch.equal(flat(T.leaves(a.state)[0]), flat(T.leaves(b.state)[0]))
        for u, v in zip(T.leaves(a.state), T.leaves(b.state), strict=True):
            assert torch.equal(u, v)
    with pytest.raises(
        FedfleetError, match="not finite"
    ):  # the test would see a trace: anybody's data count once heard
        play(name, type(world)(world.task, spoilt), Federation(), rounds=20, selection=Uniform())
