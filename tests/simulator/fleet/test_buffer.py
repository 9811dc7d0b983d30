"""Filling an asynchronous server's buffer: uniform draws, whatever is played ahead, at a cost that grows with what is launched."""

from dataclasses import dataclass, field

import pytest
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet import buffer
from fedfleet.simulator.fleet.availability import Always, Bernoulli
from fedfleet.simulator.fleet.buffer import Server, fill, lapse
from fedfleet.simulator.fleet.devices import Homogeneous, Load, Times
from fedfleet.simulator.fleet.idle_sampler import IdleSampler
from fedfleet.simulator.fleet.in_flight import Flights
from fedfleet.simulator.fleet.responses import Federation, Outcome


def server(version=0, clients=100_000, concurrency=6400, **models):
    models = {"devices": Homogeneous(1.0, 0.5), **models}
    return Server(
        federation=Federation(**models),
        clients=clients,
        load=lambda c: Load(torch.ones_like(c), torch.ones_like(c)),
        root=rng.key(3),
        version=version,
        concurrency=concurrency,
        max_staleness=2,
        tries=10,
        retry_s=1.0,
    )


@dataclass(frozen=True)
class Counted:
    """Devices that count how often they are asked."""

    asked: list[int] = field(default_factory=list)

    def times(self, key, clients, load):
        self.asked.append(len(clients))
        return Homogeneous(1.0, 0.5).times(key, clients, load)


@pytest.mark.slow
@pytest.mark.parametrize("availability", [Always(), Bernoulli(0.5)])
def test_the_models_are_asked_for_many_clients_at_once(availability):
    devices, flights = Counted(), Flights()
    launched = sum(
        fill(server(version, devices=devices, availability=availability), flights, 640, float(version)).launched
        for version in range(4)
    )
    assert launched >= 6400 + 3 * 640
    assert len(devices.asked) < launched / 50
    assert sum(devices.asked) < 6 * launched


@pytest.mark.parametrize("clients", [64, 66, 300])
@pytest.mark.parametrize(
    "models", [{}, {"availability": Bernoulli(0.4), "hazard": 1.0, "devices": Homogeneous(1.0, 1.5)}]
)
@pytest.mark.slow
def test_nothing_depends_on_how_far_it_is_played_ahead(monkeypatch, clients, models):
    def run():
        flights, clock, found = Flights(), 0.0, []
        for version in range(12):
            ended = fill(server(version, clients, 64, **models), flights, 9, clock)
            flights.commit()
            clock += ended.responses.duration_s
            found.append((ended.clients.tolist(), ended.responses.outcome.tolist(), ended.used, ended.launched, clock))
        return found, flights.committed

    one = run()
    for stretch, long in ((64, 1), (1, 8), (1, 0.02)):
        monkeypatch.setattr(buffer, "STRETCH", stretch)
        monkeypatch.setattr(buffer, "LONG", long)
        assert run() == one


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "busy"), [(20, range(0, 20, 2)), (128, range(4, 128)), (128, [])])
def test_whoever_is_idle_comes_first_equally_often(clients, busy, p_value):
    idle = IdleSampler(rng.key(5), clients, len(range(clients)), busy)
    draws = [list(idle.draw(moment)) for moment in range(1000)]
    free = sorted(set(range(clients)) - set(busy))
    assert all(sorted(d) == free for d in draws[:20])
    first = torch.tensor([d[0] for d in draws]).bincount(minlength=clients)[free]
    second = torch.tensor([d[1] for d in draws]).bincount(minlength=clients)[free]
    assert p_value(first.numpy()) > 1e-3
    assert p_value(second.numpy()) > 1e-3
    assert list(idle.copy().draw(7)) == draws[7]


def test_a_discarded_fill_leaves_no_trace():
    flights = Flights()
    first = fill(server(clients=300, concurrency=64), flights, 9, 0.0)
    flights.discard()
    assert (len(flights), flights.launched) == (0, 0)
    again = fill(server(clients=300, concurrency=64), flights, 9, 0.0)
    assert torch.equal(first.clients, again.clients)
    assert first.used == again.used


def test_a_buffer_that_nobody_can_fill_waits_as_often_as_it_tries():
    flights = Flights()
    ended = fill(server(clients=20, concurrency=8, availability=Bernoulli(0.0)), flights, 4, 2.0)
    assert (ended.used, ended.responses.duration_s) == ([], 10 * 1.0)  # ten tries, a second each


def test_a_server_that_steps_by_time_uses_what_has_come_in_it():
    """Nobody is at work twice, all have their turn, and who has no place, is offline or fails is not heard."""
    flights, launched, seen, outcomes = Flights(), 0, set(), set()
    models = {"availability": Bernoulli(0.7), "hazard": 0.3, "devices": Homogeneous(1.0, 1.0)}
    for version in range(60):
        before = flights.under_way()
        at = server(version, clients=20, concurrency=8, **models)
        ended = lapse(at, flights, 0.5, 0.5 * version)
        now = flights.under_way()
        assert len({f.client for f in now}) == len(now) <= 8
        assert ended.responses.duration_s == 0.5
        assert all(0.5 * version < f.ends_s <= 0.5 * (version + 1) for f in ended.used)
        assert all(f.ends_s > 0.5 * (version + 1) for f in now)
        done = ended.responses.outcome != Outcome.UNAVAILABLE
        assert len(before) + ended.launched == len(now) + int(done.sum())
        assert len(ended.used) == int(
            ((ended.responses.outcome == Outcome.COMPLETED) | (ended.responses.outcome == Outcome.STALE)).sum()
        )
        assert [f.client for f in ended.used] == ended.clients[
            torch.isin(ended.responses.outcome, torch.tensor([0, 4]))
        ].tolist()
        launched += ended.launched
        seen |= set(ended.clients[done].tolist())
        outcomes |= set(ended.responses.outcome.tolist())
        again = Flights()
        again.replace(before, 0)
        dropped = at._replace(dropped={f.number for f in before})
        assert all(f.number not in dropped.dropped for f in lapse(dropped, again, 0.5, 0.5 * version).used)
    assert seen == set(range(20))
    assert outcomes == {int(f) for f in Outcome}
    assert launched <= flights.launched


def test_an_answer_that_comes_as_the_step_ends_is_used():
    """0.3 s in steps of 0.1, whose sums are rounded: heard at the third of each three steps."""

    @dataclass(frozen=True)
    class Same:
        def times(self, key, clients, load):
            whole = torch.full(clients.shape, 0.3, dtype=torch.float64)
            return Times(whole, torch.zeros_like(whole))

    flights, clock, used = Flights(), 0.0, []
    for version in range(30):
        used.append(len(lapse(server(version, clients=1, devices=Same()), flights, 0.1, clock).used))
        clock += 0.1
    assert used == [0, 0, 1] * 10
