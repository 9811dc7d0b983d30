"""Filling an asynchronous server's buffer: uniform draws, whatever is played ahead, at a cost that grows with what is launched."""

from dataclasses import dataclass, field

import pytest
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet import buffer
from fedfleet.simulator.fleet.availability import Always, Bernoulli
from fedfleet.simulator.fleet.buffer import Server, fill
from fedfleet.simulator.fleet.devices import Alike, Load
from fedfleet.simulator.fleet.flights import Flights
from fedfleet.simulator.fleet.idle import Idle
from fedfleet.simulator.fleet.responses import Federation


def server(version=0, clients=100_000, concurrency=6400, **models):
    models = {"devices": Alike(1.0, 0.5), **models}
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
        return Alike(1.0, 0.5).times(key, clients, load)


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
@pytest.mark.parametrize("models", [{}, {"availability": Bernoulli(0.4), "hazard": 1.0, "devices": Alike(1.0, 1.5)}])
@pytest.mark.slow
def test_nothing_depends_on_how_far_it_is_played_ahead(monkeypatch, clients, models):
    def run():
        flights, clock, found = Flights(), 0.0, []
        for version in range(12):
            ended = fill(server(version, clients, 64, **models), flights, 9, clock)
            flights.commit()
            clock += ended.responses.duration_s
            found.append((ended.clients.tolist(), ended.responses.fate.tolist(), ended.used, ended.launched, clock))
        return found, flights.committed

    one = run()
    for stretch, long in ((64, 1), (1, 8), (1, 0.02)):
        monkeypatch.setattr(buffer, "STRETCH", stretch)
        monkeypatch.setattr(buffer, "LONG", long)
        assert run() == one


@pytest.mark.parametrize(("clients", "busy"), [(20, range(0, 20, 2)), (128, range(4, 128)), (128, [])])
def test_whoever_is_idle_comes_first_equally_often(clients, busy, p_value):
    idle = Idle(rng.key(5), clients, len(range(clients)), busy)
    draws = [list(idle.draw(moment)) for moment in range(2000)]
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
