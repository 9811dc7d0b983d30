"""Client selection: whom the server invites."""

import math

import pytest
import torch

from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.selection import (
    ByExamples,
    Completed,
    Known,
    Oort,
    Poisson,
    PowerOfChoice,
    RoundRobin,
    Tifl,
    Uniform,
)
from tests.refusals import all_refused

pytestmark = pytest.mark.quick

SIZES = torch.tensor([1, 1, 2, 4, 8, 16])
PROBLEM = Problem(6, 5.0, lambda clients: SIZES[clients])
MANY = Problem(1000, 5.0, lambda clients: 1 + clients % 7)
ALL = [Uniform(), ByExamples(), RoundRobin(), PowerOfChoice(), Oort(), Tifl()]


def completed(t, clients, loss, seconds=None):
    clients = torch.tensor(clients)
    seconds = torch.ones(len(clients)) if seconds is None else torch.tensor(seconds)
    return Completed(t, clients, torch.tensor(loss), seconds, SIZES[clients])


@pytest.mark.parametrize("selection", ALL, ids=lambda s: type(s).__name__)
def test_cohorts_hold_so_many_different_clients_and_depend_on_the_key_alone(selection):
    state = selection.init()
    for t in range(8):
        key = rng.fold(rng.key(3), t)
        clients, new = selection.invite(state, key, 30, MANY, replace=False)
        again, _ = selection.invite(state, key, 30, MANY, replace=False)
        assert clients.dtype == torch.int64
        assert clients.tolist() == again.tolist()
        assert len(clients.unique()) == 30
        assert 0 <= int(clients.min()) <= int(clients.max()) < 1000
        loss = rng.uniform(key, 20)
        state = selection.observe(new, Completed(t, clients[:20], loss, 1.0 + clients[:20] % 3, torch.ones(20)))


def test_a_selection_that_cannot_draw_with_replacement_says_so(subtests):
    kinds = {
        "round_robin": RoundRobin(),
        "power_of_choice": PowerOfChoice(),
        "oort": Oort(),
        "poisson": Poisson(),
        "tifl": Tifl(),
    }
    rows = [(selection, f"selection.kind='{kind}'") for kind, selection in kinds.items()]
    all_refused(subtests, lambda s: s.invite(s.init(), rng.key(1), 3, PROBLEM, replace=True), rows)


def test_by_examples_draws_the_first_client_in_proportion(p_value):
    first = torch.stack(
        [ByExamples().invite(None, rng.fold(rng.key(1), i), 2, PROBLEM, replace=False)[0] for i in range(3000)]
    )
    expected = 3000 * SIZES / SIZES.sum()
    assert p_value(first[:, 0].bincount(minlength=6).numpy(), expected.numpy()) > 1e-3
    second = first[:, 1][first[:, 0] == 5]  # the others in proportion again
    rest = SIZES[:5] / SIZES[:5].sum() * len(second)
    assert p_value(second.bincount(minlength=5).numpy(), rest.numpy()) > 1e-3


def test_by_examples_with_replacement_draws_independently(p_value):
    clients, _ = ByExamples().invite(None, rng.key(2), 6000, PROBLEM, replace=True)
    assert p_value(clients.bincount(minlength=6).numpy(), (6000 * SIZES / SIZES.sum()).numpy()) > 1e-3


def test_round_robin_invites_all_before_any_twice():
    selection, state, seen = RoundRobin(), RoundRobin().init(), []
    for t in range(5):
        clients, state = selection.invite(state, rng.key(t), 12, Problem(20, 1.0), replace=False)
        seen += clients.tolist()
    assert [sorted(seen[i : i + 20]) for i in (0, 20, 40)] == [list(range(20))] * 3


def test_poisson_invites_each_for_itself():
    drawn = torch.zeros(2000, 50)
    for t in range(2000):
        clients, _ = Poisson().invite(None, rng.fold(rng.key(0), t), 10, Problem(50, 1.0), replace=False)
        drawn[t, clients] = 1
    assert drawn.mean() == pytest.approx(0.2, abs=0.005)
    assert (drawn.mean(0) - 0.2).abs().max() < 0.04
    assert float(drawn.sum(1).var()) == pytest.approx(
        50 * 0.2 * 0.8, rel=0.15
    )  # which it is where they are independent
    assert float((drawn[1:] * drawn[:-1]).mean()) == pytest.approx(0.04, abs=0.005)
    assert Poisson().invite(None, rng.key(0), 50, Problem(50, 1.0), replace=False)[0].tolist() == list(range(50))


def test_power_of_choice_prefers_the_unheard_then_the_largest_loss():
    selection = PowerOfChoice(factor=3.0)
    state = selection.observe(selection.init(), completed(0, [0, 1, 2, 3, 4], [0.1, 0.9, 0.5, 0.7, 0.2]))
    clients, state = selection.invite(state, rng.key(1), 2, PROBLEM, replace=False)
    assert clients.tolist() == [5, 1]  # all six are candidates; 5 was never heard
    state = selection.observe(state, completed(1, [5, 1], [0.3, 0.05]))
    assert selection.invite(state, rng.key(1), 3, PROBLEM, replace=False)[0].tolist() == [3, 2, 5]


def test_power_of_choice_chooses_among_its_candidates_only(p_value):
    selection = PowerOfChoice(factor=1.0)  # as many candidates as places: by examples, whatever the losses
    state = selection.observe(selection.init(), completed(0, [0, 1, 2, 3, 4, 5], [9.0, 0, 0, 0, 0, 0]))
    drawn = [int(selection.invite(state, rng.fold(rng.key(2), i), 1, PROBLEM, replace=False)[0]) for i in range(2000)]
    expected = 2000 * SIZES / SIZES.sum()
    assert p_value(torch.tensor(drawn).bincount(minlength=6).numpy(), expected.numpy()) > 1e-3


def test_oort_explores_less_and_less():
    selection, state = Oort(), Oort().init()
    shares = []
    for t in range(120):
        known = set(state[0].clients.tolist())
        clients, state = selection.invite(state, rng.fold(rng.key(4), t), 20, Problem(10_000, 1.0), replace=False)
        shares.append(sum(c not in known for c in clients.tolist()) / 20)
        ones = torch.ones(len(clients))
        state = selection.observe(state, Completed(t, clients, ones, ones, ones))
    assert shares[0] == 1.0  # nobody is known yet
    assert shares[1] == math.floor(0.9 * 0.98 * 20) / 20
    assert shares[-1] == 0.2


def test_oort_exploits_utility_and_punishes_slowness():
    selection = Oort(explore=0.0, explore_least=0.0, cutoff=1.0)
    loss = [1.0] * 6  # utility is examples * loss, so client 5 has most to offer
    state = selection.observe(selection.init(), completed(0, range(6), loss))
    assert selection.invite(state, rng.key(1), 1, PROBLEM, replace=False)[0].tolist() == [5]
    slow = selection.observe(selection.init(), completed(0, range(6), loss, [1.0, 1, 1, 1, 1, 10]))
    assert selection.invite(slow, rng.key(1), 1, PROBLEM, replace=False)[0].tolist() == [4]


@pytest.mark.slow
def test_oort_draws_in_proportion_to_utility_and_the_slow_by_so_much_less(p_value):
    """Clients 0 and 2 offer as much, client 1 the least; 2 takes twice the pace, the median. sqrt(0.1 log 2) is for being new."""
    selection, new = Oort(explore=0.0, explore_least=0.0, cutoff=0.0, penalty=1.0), math.sqrt(0.1 * math.log(2))
    three = Problem(3, 1.0, torch.ones_like)
    state = selection.observe(
        selection.init(),
        Completed(0, torch.arange(3), torch.tensor([9.0, 1, 9]), torch.tensor([1.0, 1, 2]), torch.ones(3)),
    )
    keys = (rng.fold(rng.key(9), t) for t in range(4000))
    drawn = torch.tensor([int(selection.invite(state, key, 1, three, replace=False)[0]) for key in keys])
    weight = torch.tensor([1 + new, new, (1 + new) / 2], dtype=torch.float64)
    assert p_value(drawn.bincount(minlength=3).tolist(), (4000 * weight / weight.sum()).tolist()) > 1e-3


def tiered(**options):
    """Return TiFL of three tiers of two clients, which take 6, 5, ..., 1 seconds, with the state after all were heard once."""
    selection = Tifl(tiers=3, **options)
    state, seen = selection.init(), []
    for t in range(3):
        clients, state = selection.invite(state, rng.key(t), 2, PROBLEM, replace=False)
        seen += clients.tolist()
        state = selection.observe(
            state, completed(t, clients.tolist(), clients.double().tolist(), (6.0 - clients).tolist())
        )
    assert sorted(seen) == list(range(6))
    return selection, state


def test_tifl_draws_cohorts_of_one_speed(p_value):
    selection, state = tiered()
    drawn = [selection.invite(state, rng.fold(rng.key(5), t), 2, PROBLEM, replace=False)[0] for t in range(600)]
    tiers = torch.tensor([[5, 4], [3, 2], [1, 0]])
    found = torch.tensor([next(k for k in range(3) if set(c.tolist()) == set(tiers[k].tolist())) for c in drawn])
    assert p_value(found.bincount(minlength=3).numpy(), [200.0] * 3) > 1e-3
    one = [int(selection.invite(state, rng.fold(rng.key(6), t), 1, PROBLEM, replace=False)[0]) for t in range(600)]
    assert p_value(torch.tensor(one).bincount(minlength=6).numpy(), [100.0] * 6) > 1e-3


def test_tifl_comes_to_the_tiers_of_larger_loss_more_often():
    """Losses are the clients' numbers, so that of the fastest tier is the largest: chances 3, 2 and 1 over 6."""
    selection, state = tiered(interval=4)
    for t in range(5):
        assert state.chance.tolist() == pytest.approx([1 / 3] * 3)
        _, state = selection.invite(state, rng.key(t), 2, PROBLEM, replace=False)
    assert state.chance.tolist() == pytest.approx([3 / 6, 2 / 6, 1 / 6])


def test_tifl_spends_credits_and_gives_them_anew():
    selection, state = tiered(interval=1, credits=2)
    tiers = []
    for t in range(12):
        clients, state = selection.invite(state, rng.key(t), 2, PROBLEM, replace=False)
        tiers.append(2 - int(clients.min()) // 2)
        left = [2 - tiers[t // 6 * 6 :].count(k) for k in range(3)]
        assert state.credit.tolist() == (left if any(left) else [2.0] * 3)
    assert sorted(tiers[:6]) == sorted(tiers[6:]) == [0, 0, 1, 1, 2, 2]
    # who has no credit has no chance
    spent = state._replace(credit=torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64), drawn=1)
    _, new = selection.invite(spent, rng.key(1), 2, PROBLEM, replace=False)
    assert new.chance.tolist() == pytest.approx([0, 2 / 3, 1 / 3])


def test_tifl_draws_no_tier_without_credit_whenever_chances_are_new():
    for interval, credits in ((10, 1), (10, 2), (7, 3)):
        selection, state = tiered(interval=interval, credits=credits)
        for t in range(60):
            before = state.credit
            clients, state = selection.invite(state, rng.key(t), 2, PROBLEM, replace=False)
            assert before[2 - int(clients.min()) // 2] > 0, (interval, credits, t)
            assert bool((state.credit >= 0).all())


def test_tifl_counts_those_never_heard_as_the_slowest():
    selection, state = tiered()
    state = state._replace(known=Known.nothing("loss", "seconds"))
    state = selection.observe(state, completed(3, [1, 4], [0.5, 0.5], [9.0, 2.0]))
    for tier, expected in enumerate(([1, 4], [0, 2], [3, 5])):
        sure = state._replace(chance=torch.eye(3, dtype=torch.float64)[tier])
        clients, _ = selection.invite(sure, rng.key(tier), 2, PROBLEM, replace=False)
        assert sorted(clients.tolist()) == expected


def test_what_is_known_is_the_latest():
    known = Known.nothing("loss").updated(torch.tensor([7, 3]), {"loss": torch.tensor([1.0, 2.0])})
    known = known.updated(torch.tensor([3, 9, 3]), {"loss": torch.tensor([4.0, 5.0, 6.0])})
    assert known.clients.tolist() == [3, 7, 9]
    assert known.get("loss", torch.tensor([9, 8, 3, 7]), -1.0).tolist() == [5.0, -1.0, 6.0, 1.0]
