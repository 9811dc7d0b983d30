import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.availability import Always, Bernoulli
from fedfleet.simulator.fleet.devices import Homogeneous, Load
from fedfleet.simulator.fleet.policies import First, Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Federation, Outcome, Responses, respond
from tests.parts import slow_but

DRAWS = 4000


def load(clients: Tensor, steps: int = 1) -> Load:
    return Load(torch.full_like(clients, steps), torch.full_like(clients, 10 * steps))


def answer(seed: int, clients: Tensor, **models: Any) -> Responses:
    key = rng.fold(rng.key(seed), "phase")
    return respond(Federation(**models), clients, torch.zeros_like(clients), load(clients), 0.0, key, key)


def online_at_once(model: Any, key: rng.Key, clients: Tensor) -> Tensor:
    return model.online(key, clients, torch.zeros(len(clients), dtype=torch.float64))


def seconds_of(devices: Homogeneous, key: rng.Key, clients: Tensor) -> Tensor:
    return devices.times(key, clients, load(clients)).after(torch.ones_like(clients))


@pytest.mark.parametrize(("invited", "least"), slow_but([(8, 5), (16, 9), (9, 5), (2, 2), (1, 1)], (9, 5), (2, 2)))
def test_siwer_waits_for_each_number_above_half_alike(invited, least, p_value):
    counts = torch.tensor([Siwer().wanted(invited, rng.fold(rng.key(1), i)) for i in range(DRAWS)]).bincount()
    found = counts[least:].numpy()
    assert int(counts[:least].sum()) == 0
    assert len(counts) == invited + 1
    if invited % 2 == 0:
        assert p_value(found) > 1e-3 or len(found) == 1
    elif invited == 9:  # ceil(9 p): 5 for p in (1/2, 5/9], then 6 .. 9 each twice as likely
        assert p_value(found, DRAWS * torch.tensor([1, 2, 2, 2, 2]).numpy() / 9) > 1e-3


def test_the_two_phases_draw_numbers_of_their_own(p_value):
    clients = torch.arange(8)
    pairs = torch.zeros(4, 4)
    for i in range(DRAWS // 4):
        root = rng.fold(rng.key(9), i)
        one, two = (
            len(respond(Federation(policy=Siwer()), clients, clients * 0, load(clients), 0.0, k, k).completed)
            for k in (rng.fold(root, 0), rng.fold(root, 1))
        )
        pairs[one - 5, two - 5] += 1
    assert p_value(pairs.flatten().numpy()) > 1e-3


@pytest.mark.parametrize(("low", "high"), [(0.5, 1.0), (0.2, 0.6), (0.0, 0.01), (1.0, 1.0), (0.3, 0.3)])
def test_siwer_never_waits_for_fewer_than_options_say(low, high):
    policy = Siwer(low, high)
    for invited in (1, 7, 10):
        drawn = {policy.wanted(invited, rng.fold(rng.key(2), i)) for i in range(500)}
        options = CohortOptions(size=invited, wait_for="siwer", response_low=low, response_high=high)
        assert min(drawn) == options.fewest


def test_siwer_with_limits_of_its_own(p_value):
    policy = Siwer(low=0.2, high=0.6)
    counts = torch.tensor([policy.wanted(10, rng.fold(rng.key(2), i)) for i in range(DRAWS)]).bincount(minlength=11)
    assert counts.nonzero().flatten().tolist() == [3, 4, 5, 6]
    assert p_value(counts[3:7].numpy()) > 1e-3
    assert {Siwer(low=1.0).wanted(7, rng.fold(rng.key(2), i)) for i in range(50)} == {7}
    assert {Siwer(low=0.0, high=0.01).wanted(7, rng.fold(rng.key(2), i)) for i in range(50)} == {1}


def test_fixed_policies():
    key = rng.key(0)
    answers = torch.arange(1.0, 9.0, dtype=torch.float64)
    assert [First(3).close(answers[:n], 8, 9.0, key) for n in (1, 3, 8)] == [(1, 9.0), (3, 3.0), (3, 3.0)]
    assert [WaitAll().close(answers[:n], 8, 9.0, key) for n in (1, 3, 8)] == [(1, 9.0), (3, 9.0), (8, 9.0)]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_bernoulli_clients_are_online_at_their_rate(rate):
    online = online_at_once(Bernoulli(rate), rng.key(3), torch.arange(DRAWS))
    assert abs(float(online.double().mean()) - rate) <= 4 * math.sqrt(rate * (1 - rate) / DRAWS)
    again = online_at_once(Bernoulli(rate), rng.key(4), torch.arange(DRAWS))
    both = float((online & again).double().mean())
    assert abs(both - rate**2) <= 4 * math.sqrt(rate**2 * (1 - rate**2) / DRAWS)  # afresh at every invitation
    assert online_at_once(Always(), rng.key(3), torch.arange(5)).all()


def test_answer_times_have_the_median_and_spread_they_say():
    seconds = seconds_of(Homogeneous(median_s=3.0, sigma=0.5), rng.key(5), torch.arange(20_000))
    assert seconds.dtype == torch.float64
    assert float(seconds.median()) == pytest.approx(3.0, rel=0.03)
    assert float(seconds.log().std()) == pytest.approx(0.5, rel=0.03)
    assert seconds_of(Homogeneous(2.0, 0.0), rng.key(5), torch.arange(4)).tolist() == [2.0] * 4


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_who_is_first_is_drawn_whatever_the_work(steps):
    clients, first = torch.arange(3), []
    for i in range(300):
        key = rng.fold(rng.key(i), "phase")
        federation, nobody_twice = Federation(policy=First(1)), torch.zeros_like(clients)
        found = respond(federation, clients, nobody_twice, load(clients, steps), 0.0, key, key)
        assert float(found.seconds.min()) > 0
        first.append(int((found.outcome == Outcome.COMPLETED).nonzero()))
    assert min(first.count(c) for c in range(3)) > 70


def test_what_a_client_draws_depends_on_no_other():
    clients = torch.tensor([11, 5, 8, 2])
    models: dict[str, Any] = {"availability": Bernoulli(0.5)}
    together = answer(6, clients, **models)
    backwards = answer(6, clients.flip(0), **models)
    assert torch.equal(together.outcome, backwards.outcome.flip(0))
    assert torch.equal(together.seconds, backwards.seconds.flip(0))
    assert float(answer(6, clients[2:3], **models).seconds) == float(together.seconds[2])


def test_copies_of_one_client_share_availability_but_not_times():
    key = rng.key(7)
    clients, copies = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    for seed in range(10):
        found = respond(
            Federation(availability=Bernoulli(0.5)), clients, copies, load(clients), 0.0, rng.fold(key, seed), key
        )
        assert len(found.outcome.unique()) == 1
        assert len(found.seconds.unique()) == (6 if found.outcome[0] == Outcome.COMPLETED else 1)


@pytest.mark.parametrize("policy", [First(3), Siwer()], ids=repr)
def test_every_invited_client_is_heard_equally_often(policy):
    clients = torch.tensor([3, 1000, 17, 4, 5, 900_000, 0, 12])
    draws = [answer(i, clients, availability=Bernoulli(0.6), policy=policy) for i in range(1000)]
    heard = torch.stack([d.outcome == Outcome.COMPLETED for d in draws]).double()
    # The clients of a phase compete, so a count's spread is not binomial. Under exchangeability, with variance v of one
    # entry and c between two, sum (count - mean)^2 / (draws * (v - c)) is chi-square with 7 degrees of freedom.
    covariance = heard.T.cov()
    apart = (covariance.trace() - (covariance.sum() - covariance.trace()) / 7) / 8
    counts = heard.sum(0)
    statistic = float(((counts - counts.mean()) ** 2).sum() / (len(heard) * apart))
    assert 0.3 < statistic < 29  # 1e-4 on either side


def test_all_sets_of_heard_clients_are_alike(p_value):
    sets = torch.stack([answer(i, torch.arange(5), policy=First(2)).completed for i in range(1500)])
    counts = (sets @ torch.tensor([5, 1])).unique(return_counts=True)[1]
    assert len(counts) == 10
    assert p_value(counts.numpy()) > 1e-3


def test_the_count_key_alone_decides_how_many_are_waited_for():
    clients = torch.arange(16)
    count_key, siwer = rng.key(8), Federation(policy=Siwer())
    numbers = {
        len(respond(siwer, clients, torch.zeros_like(clients), load(clients), 0.0, rng.key(s), count_key).completed)
        for s in range(20)
    }
    assert len(numbers) == 1
