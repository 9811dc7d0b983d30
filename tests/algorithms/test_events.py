"""The engine against a federation played event by event: outcomes, moments, clock, floats, and the model."""

import math
from dataclasses import replace

import pytest
import torch
from events import LIMIT, Async, Rules, Sync, Work
from harness import TOY, Bowl, Game, World, build, flat, records, rows
from hypothesis import example, given
from hypothesis import strategies as st

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.fleet.availability import Always, Bernoulli
from fedfleet.simulator.fleet.devices import Homogeneous, Load
from fedfleet.simulator.fleet.online.diurnal import Diurnal
from fedfleet.simulator.fleet.online.markov import Markov
from fedfleet.simulator.fleet.online.random_rate import RandomRate
from fedfleet.simulator.fleet.policies import Deadline, First, Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Federation, Outcome

CLIENTS, STEPS, LR = 20, 4, 0.25
MINIMA = [float(m) for m in range(CLIENTS)]
BOWL = World(Bowl(), rows(*[[(1.0, m)] * 3 for m in MINIMA]))
GAMES = World(Game(), rows(*[[r for r in ((1, 2, 1, 1, -i), (3, 0, 2, -3, i))] for i in range(CLIENTS)]))
assert TOY.size == 2
OUTCOMES = list(Outcome)

availabilities = st.one_of(
    st.just(Always()),
    st.sampled_from([0.3, 0.8]).map(Bernoulli),
    st.just(RandomRate(0.2, 0.9)),
    st.builds(Markov, st.integers(0, 50).map(rng.key), st.just(2.0), st.sampled_from([0.5, 2.0])),
    st.builds(Diurnal, st.integers(0, 50).map(rng.key), day_s=st.just(6.0)),
)
devices = st.sampled_from([Homogeneous(1.0, 0.0), Homogeneous(1.0, 0.5), Homogeneous(0.7, 1.2)])
ways = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "availability": availabilities,
        "devices": devices,
        "hazard": st.sampled_from([0.0, 0.0, 0.4]),
        "attempts": st.sampled_from([1, 3, 30]),
        "retry_s": st.sampled_from([0.0, 0.5, 3.0]),
    }
)
policies = st.one_of(
    st.fixed_dictionaries(
        {
            "wait": st.sampled_from(["all", 1, 3, 6, (0.5, 1.0), (0.1, 0.4)]),
            "deadline": st.sampled_from([math.inf, math.inf, 0.6, 1.0, 1.7]),
        }
    ),
    st.fixed_dictionaries({"over_select": st.sampled_from([1.3, 2.0]), "deadline": st.sampled_from([math.inf, 1.1])}),
)
sync = st.builds(
    lambda way, policy, more: Rules(clients=CLIENTS, size=6, **way, **policy, **more),
    ways,
    policies,
    st.fixed_dictionaries(
        {
            "partial": st.booleans(),
            "least": st.sampled_from([1, 1, 2, 4]),
            "discount": st.sampled_from([None, 0.5, 1.0]),
        }
    ),
)


def federation(r: Rules) -> Federation:
    policy = WaitAll()
    if r.over_select > 1:
        policy = First(r.size)
    elif isinstance(r.wait, int):
        policy = First(r.wait)
    elif isinstance(r.wait, tuple):
        policy = Siwer(*r.wait)
    policy = policy if r.deadline == math.inf else Deadline(r.deadline, policy)
    return Federation(
        availability=r.availability, devices=r.devices, policy=policy, hazard=r.hazard, partial_work=r.partial
    )


def engine(algorithm, world, r: Rules, rounds):
    """Return the rounds that succeeded, and whether all did."""
    found = []
    given = {"over_select": r.over_select, "stale_discount": r.discount, "min_responses": r.least}
    try:
        for record in records(
            algorithm,
            world,
            rounds,
            seed=r.seed,
            federation=federation(r),
            attempts=r.attempts,
            retry_s=r.retry_s,
            **given,
        ):
            found.append(record)
    except FedfleetError as e:
        if f"in {r.attempts} cohorts in a row" not in str(e) and "answers came in, and then none" not in str(e):
            raise
        return found, False
    return found, True


def agree(record, played, clock_s, floats, cuts):
    """Check one round; ``floats`` is what a client sends in a phase."""
    assert record.virtual_s == pytest.approx(clock_s, abs=LIMIT)
    assert [(p.phase, p.attempt) for p in record.phases] == [(p.phase, p.attempt) for p in played]
    before = record.started_s
    for p, q in zip(record.phases, played, strict=True):
        assert p.started_s >= before
        assert p.started_s == pytest.approx(q.started_s, abs=LIMIT)
        assert p.responses.duration_s == pytest.approx(q.duration_s, abs=LIMIT)
        before = p.started_s + p.responses.duration_s
        assert p.clients.tolist() == [a.client for a in q.answers]
        assert [OUTCOMES[f] for f in p.responses.outcome.tolist()] == [a.outcome for a in q.answers]
        assert p.responses.seconds.tolist() == pytest.approx([a.seconds for a in q.answers], abs=LIMIT)
        outcomes = [a.outcome for a in q.answers]
        assert [p.counts[f.name.lower()] for f in OUTCOMES] == [outcomes.count(f) for f in OUTCOMES]
        sent = [
            a for a in q.answers if a.outcome is Outcome.COMPLETED
        ] + q.merged  # counts where the attempt is aborted, too
        heard = sent if q.used else []
        assert p.counts["merged_stale"] == len(q.merged)
        assert p.counts["floats_up"] == len(sent) * floats
        assert p.counts["client_steps"] == (sum(a.steps for a in heard) if q.phase in cuts else len(heard))
    assert record.virtual_s >= before


LONG_LATE = Rules(3, CLIENTS, Always(), Homogeneous(0.7, 1.2), wait=1, size=6, discount=0.5)  # by several rounds


@example(r=LONG_LATE)
@given(r=sync)
def test_rounds_go_as_their_events_do_and_so_does_the_model(r):
    algorithm = build("fedavg", BOWL.task, CohortOptions(size=6), steps=STEPS, batch_size=3, lr=LR, weight="uniform")
    found, all_of_them = engine(algorithm, BOWL, r, 4)
    work = Work("train", STEPS, divisible=True)
    server = Sync(r, [work], lambda _: Load(torch.tensor([STEPS]), torch.tensor([STEPS * 3])))
    points, delays = [1.0], set()
    for t in range(4):
        outcome = server.round(t)
        if outcome is None:
            assert len(found) == t
            assert not all_of_them
            return
        played, (heard,) = outcome
        agree(found[t], played, server.clock_s, 1, {"train"})
        delays |= {t - a.round for a in heard}
        weights = [(r.discount or 1.0) ** (t - a.round) for a in heard]
        ends = [MINIMA[a.client] + (1 - LR) ** a.steps * (points[a.round] - MINIMA[a.client]) for a in heard]
        points.append(sum(w * e for w, e in zip(weights, ends, strict=True)) / sum(weights))
        assert float(found[t].state.z["x"]["w"]) == pytest.approx(points[-1])
    assert all_of_them
    assert r is not LONG_LATE or max(delays) > 1


@given(r=sync)
@pytest.mark.slow
def test_both_phases_of_cdma_go_as_their_own_events_do(r):
    options = {"steps": STEPS, "batch_size": 2, "lr": 0.01}
    algorithm = build("cdma_ada", GAMES.task, CohortOptions(size=6), **options)
    found, all_of_them = engine(algorithm, GAMES, r, 3)
    phases = [Work("gradient", 1, divisible=False), Work("update", STEPS, divisible=True)]
    server = Sync(r, phases, lambda w: Load(torch.tensor([w.steps]), torch.tensor([2 * w.steps])))
    used: set[int] = set()
    for t in range(3):
        outcome = server.round(t)
        if outcome is None:
            assert len(found) == t
            assert not all_of_them
            break
        agree(found[t], outcome[0], server.clock_s, 2, {"update"})
        used |= {a.client for answers in outcome[1] for a in answers}
    # Who is neither heard nor used late leaves no trace: with other data for all of them, every state is the same to the bit.
    unused = torch.tensor([c not in used for c in range(CLIENTS)])
    x = GAMES.population.data["x"].clone()
    x[unused.repeat_interleave(2)] = 1e3  # and not NaN: aborted attempts train clients too
    again, _ = engine(algorithm, World(GAMES.task, replace(GAMES.population, data={"x": x})), r, len(found))
    for a, b in zip(found, again, strict=True):
        assert torch.equal(flat(a.state), flat(b.state))


asynchronous = st.builds(
    lambda way, more: Rules(clients=CLIENTS, **way, **more),
    ways,
    st.fixed_dictionaries(
        {
            "concurrency": st.sampled_from([1, 3, 12, 19, 20, 50]),
            "buffer": st.sampled_from([1, 4, 9]),
            "bound": st.sampled_from([None, 0, 1, 3]),
        }
    ),
)


@pytest.mark.slow
@given(r=asynchronous)
def test_an_asynchronous_server_goes_as_its_events_do_and_so_does_the_model(r):
    r = replace(r, attempts=max(r.attempts, 5))
    options = {"buffer": r.buffer, "concurrency": r.concurrency, "max_staleness": r.bound}
    algorithm = build("fedbuff", BOWL.task, steps=1, batch_size=3, lr=LR, global_lr=0.8, **options)
    found, all_of_them = engine(algorithm, BOWL, r, 5)
    server, points, clock_s = Async(r, Load(torch.tensor([1]), torch.tensor([3]))), [1.0], 0.0
    for t in range(5):
        used = server.step(t)
        if used is None or (len(found) == t and not all_of_them):
            assert len(found) == t
            assert not all_of_them
            break
        (phase,) = found[t].phases
        assert server.clock_s >= clock_s
        assert found[t].started_s == pytest.approx(clock_s, abs=LIMIT)
        clock_s = server.clock_s
        assert found[t].virtual_s == pytest.approx(clock_s, abs=LIMIT)
        assert phase.clients.tolist() == [f.client for f in server.ended]
        assert [OUTCOMES[f] for f in phase.responses.outcome.tolist()] == [f.outcome for f in server.ended]
        moments = (phase.responses.seconds + found[t].started_s).tolist()
        assert moments == pytest.approx([f.ends_s for f in server.ended], abs=LIMIT)
        assert phase.counts["floats_up"] == len(used) == r.buffer
        assert phase.counts["merged_stale"] == sum(f.version < t for f in used)
        assert server.most_at_work <= min(r.concurrency, CLIENTS)
        change = sum((1 + t - f.version) ** -0.5 * LR * (MINIMA[f.client] - points[f.version]) for f in used)
        points.append(points[t] + 0.8 * change / r.buffer)
        assert float(found[t].state.z["x"]["w"]) == pytest.approx(points[-1])
