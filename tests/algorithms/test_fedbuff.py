"""FedBuff, against its definition and a simulation of the server's clock."""

import pytest
import torch
from harness import Bowl, Fixed, World, build, digits, flat, play, records, rows

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.driver import round
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.buffer import fill
from fedfleet.simulator.fleet.devices import Homogeneous
from fedfleet.simulator.fleet.responses import Federation, Outcome

MINIMA = tuple(float(m) for m in range(12))
BOWL = World(Bowl(), rows(*[[(1.0, m)] for m in MINIMA]))
STEP = {"steps": 1, "batch_size": 1, "lr": 0.5}
ROUNDS = 12


@pytest.fixture
def ended(monkeypatch):
    """What each buffer was filled with."""
    found = []

    def watched(*given):
        found.append(fill(*given))
        return found[-1]

    monkeypatch.setattr(round, "fill", watched)
    return found


@pytest.mark.parametrize("bound", [None, 1])
@pytest.mark.parametrize(
    "federation", [Federation(devices=Homogeneous(1.0, 1.0)), Federation(devices=Homogeneous(1.0, 1.0), hazard=0.3)]
)
def test_the_model_is_that_of_algorithm_1(ended, federation, bound):
    algorithm = build("fedbuff", BOWL.task, buffer=3, concurrency=5, global_lr=0.8, max_staleness=bound, **STEP)
    found = list(records(algorithm, BOWL, ROUNDS, federation=federation))
    points = [1.0]
    for t, buffer in enumerate(ended):
        assert len(buffer.used) == 3
        change = 0.0
        for f in buffer.used:
            start = points[f.version]
            change += (1 + t - f.version) ** -0.5 * 0.5 * (MINIMA[f.client] - start)  # one step of half the way
        points.append(points[t] + 0.8 * change / 3)
    assert [float(r.state.z["x"]["w"]) for r in found] == pytest.approx(points[1:])
    staleness = [t - f.version for t, buffer in enumerate(ended) for f in buffer.used]
    assert max(staleness) > (1 if bound is None else 0)
    assert max(staleness) <= (ROUNDS if bound is None else bound)
    assert [r.metrics["staleness_max"] for r in found] == [
        max(t - f.version for f in buffer.used) for t, buffer in enumerate(ended)
    ]


def test_clients_start_from_the_model_of_the_moment_they_are_invited(ended):
    """Whoever is invited before the buffer of round t is full works on the model of round t."""
    seconds = tuple(1.0 + 0.37 * i + 0.011 * i * i for i in range(12))
    algorithm = build("fedbuff", BOWL.task, buffer=2, concurrency=4, **STEP)
    found = list(records(algorithm, BOWL, ROUNDS, federation=Federation(devices=Fixed(seconds))))
    full = [r.virtual_s for r in found]  # when each buffer was full
    assert full == sorted(full)
    flights = [f for buffer in ended for f in buffer.used]
    assert [f.ends_s for f in flights] == sorted(f.ends_s for f in flights)
    for f in flights:
        invited = f.ends_s - seconds[f.client]
        earlier = [t for t in range(ROUNDS) if full[t] <= invited + 1e-9]
        assert f.version == len(earlier)
    stretches = sorted((f.ends_s - seconds[f.client], f.ends_s, f.client) for f in flights)
    for start, _, client in stretches:
        at_work = [c for s, e, c in stretches if s <= start + 1e-9 < e - 1e-9]
        assert len(at_work) <= 4
        assert at_work.count(client) == 1


def test_fates_and_floats(ended):
    federation = Federation(availability=Bernoulli(0.6), devices=Homogeneous(1.0, 1.0), hazard=0.2)
    algorithm = build("fedbuff", BOWL.task, buffer=3, concurrency=6, max_staleness=2, **STEP)
    found = list(records(algorithm, BOWL, 30, federation=federation))
    seen = set()
    for r, buffer in zip(found, ended, strict=True):
        (phase,) = r.phases
        c, outcomes = phase.counts, phase.responses.outcome.tolist()
        assert c["invited"] == len(outcomes) == sum(c[f.name.lower()] for f in Outcome)
        assert c["completed"] + c["stale"] == 3 == c["floats_up"] == c["client_steps"]
        assert c["completed"] == sum(f.version == r.index for f in buffer.used)
        assert phase.responses.duration_s == pytest.approx(r.virtual_s - r.started_s)
        seen |= set(outcomes)
    assert seen == {int(f) for f in Outcome}
    down = sum(r.phases[0].counts["floats_down"] for r in found)
    ends = sum(r.phases[0].counts[k] for r in found for k in ("completed", "stale", "late", "failed"))
    assert ends <= down <= ends + 6  # all that ended were sent the model, and those still at work


def test_with_one_client_at_a_time_it_is_sequential_training():
    world = digits("classification")
    algorithm = build("fedbuff", world.task, buffer=1, concurrency=1, steps=3, batch_size=5)
    found = list(records(algorithm, world, 4))
    assert all(r.metrics == {"staleness_mean": 0.0, "staleness_max": 0.0} for r in found)
    assert all(r.state.versions == {} for r in found)


def test_it_is_a_function_of_the_seed_and_learns():
    world = digits("classification")
    algorithm = build("fedbuff", world.task, buffer=5, concurrency=10, epochs=1, batch_size=5)
    a, b = (play(algorithm, world, 5, inner="factored") for _ in range(2))
    other = play(algorithm, world, 5, inner="factored", seed=1)
    assert torch.equal(flat(a[-1]), flat(b[-1]))
    assert not torch.equal(flat(a[-1]), flat(other[-1]))


def test_versions_are_kept_only_while_somebody_works_on_them():
    algorithm = build("fedbuff", BOWL.task, buffer=2, concurrency=4, **STEP)
    found = list(records(algorithm, BOWL, 40, federation=Federation(devices=Homogeneous(1.0, 1.5))))
    assert all(len(r.state.versions) <= 4 for r in found)
    assert all(v <= r.index for r in found for v in r.state.versions)


def test_where_nobody_can_be_reached_it_says_so():
    class Nobody:
        def online(self, key: rng.Key, clients: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(clients), dtype=torch.bool)

    algorithm = build("fedbuff", BOWL.task, CohortOptions(), buffer=2, concurrency=4, **STEP)
    message = "0 of 2 answers came in, and then none, .*: raise the rate of availability or cohort.retry_s"
    for federation in (Federation(availability=Nobody()), Federation(hazard=1e6)):
        with pytest.raises(FedfleetError, match=message):
            list(records(algorithm, BOWL, 1, federation=federation, attempts=3))


def test_where_nobody_can_be_reached_for_a_while_time_goes_on():
    class Later:
        def online(self, key: rng.Key, clients: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
            return seconds >= 7

    algorithm = build("fedbuff", BOWL.task, CohortOptions(), buffer=2, concurrency=4, **STEP)
    found = list(records(algorithm, BOWL, 3, federation=Federation(availability=Later()), retry_s=2.0))
    assert found[0].virtual_s > 8.0
    assert all(bool((p.responses.seconds >= 0).all()) for r in found for p in r.phases)
