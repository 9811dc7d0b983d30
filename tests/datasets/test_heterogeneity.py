"""The option `heterogeneity` of by_domain: how far clients of several domains mix."""

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from fedfleet.config import population, schema
from fedfleet.datasets import partition
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.partition import Partition
from fedfleet.datasets.partition_config import PARTITIONS
from fedfleet.experiments.experiment import Experiment
from tests.refusals import all_say, tells


def held(dealt: Partition, domains: Tensor) -> Tensor:
    """Return how many examples of each domain every client has, (clients, domains)."""
    blocks = torch.split(dealt.indices, dealt.sizes.tolist())
    return torch.stack([domains[block].bincount(minlength=int(domains.max()) + 1) for block in blocks])


domains_of = st.lists(st.integers(0, 4), min_size=6, max_size=150).map(
    lambda rest: torch.tensor([0, 1, 2, 3, 4, *rest])
)


@given(
    domains=domains_of, data=st.data(), seed=st.integers(0, 2**40), percent=st.integers(0, 100),
    targets=st.sets(st.integers(0, 4), max_size=4),
)  # fmt: skip
def test_everything_is_dealt_once_and_evenly_and_roles_do_not_mix(domains, data, seed, percent, targets):
    clients = data.draw(st.integers(5, len(domains)))
    dealt = partition.by_domain(domains, clients, seed, targets, heterogeneity=percent / 100)
    assert torch.equal(dealt.indices.sort().values, torch.arange(len(domains)))
    assert dealt.sizes.min() >= 1
    whole = partition.by_domain(domains, clients, seed, targets)
    home = domains[whole.indices[whole.offsets[:-1]]]
    assert (dealt.home is None) == (percent == 0)
    assert dealt.home is None or torch.equal(dealt.home, home)
    counts, is_target = held(dealt, domains), torch.isin(torch.arange(5), torch.tensor(sorted(targets)))
    assert (counts[is_target[home]][:, ~is_target] == 0).all()
    assert (counts[~is_target[home]][:, is_target] == 0).all()
    for d in range(5):
        sizes = dealt.sizes[home == d]
        assert sizes.max() - sizes.min() <= 1
        foreign = counts[home != d, d].sum()
        assert foreign <= (domains == d).sum() - (domains == d).sum() * percent // 100


def test_shares_are_exact_at_the_ends_and_in_the_middle():
    domains = torch.arange(4).repeat_interleave(torch.tensor([160, 80, 40, 40]))
    mixture = torch.tensor([20, 10, 5, 5])
    of = {h: partition.by_domain(domains, 8, 5, heterogeneity=h) for h in (0, 0.2, 0.5, 1)}
    homes = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    own = 40 * torch.eye(4, dtype=torch.int64)[homes]
    assert torch.equal(held(of[0], domains), mixture.expand(8, 4))
    assert torch.equal(held(of[0.2], domains), (own + 4 * mixture) // 5)
    assert (2 * held(of[0.5], domains) - own - mixture).abs().max() <= 1  # 2.5 of a domain are 2 or 3
    assert torch.equal(held(of[1], domains), own)
    assert of[1].home is not None
    assert of[1].home.tolist() == homes.tolist()
    sides = held(partition.by_domain(domains, 8, 5, [1], 3, 0), domains)
    assert sides[[0, 1, 2, 6, 7]].tolist() == [[32, 0, 8, 8]] * 5
    assert sorted(sides[3:6].tolist()) == [[0, 26, 0, 0], [0, 27, 0, 0], [0, 27, 0, 0]]


def test_at_one_it_is_as_if_nothing_were_said():
    domains = torch.arange(300) % 7 % 3
    plain, same = partition.by_domain(domains, 11, 4), partition.by_domain(domains, 11, 4, heterogeneity=1)
    assert all(map(torch.equal, (plain.indices, plain.offsets), (same.indices, same.offsets)))


def test_what_is_mixed_in_is_drawn_anew_by_the_seed_and_from_anywhere():
    domains = torch.arange(2).repeat_interleave(1000)
    dealt, again, other = (partition.by_domain(domains, 4, seed, heterogeneity=0.5) for seed in (1, 1, 2))
    assert torch.equal(dealt.indices, again.indices)
    assert not torch.equal(dealt.indices, other.indices)
    for block in torch.split(dealt.indices, 500):
        for mine in (block[block < 1000], block[block >= 1000] - 1000):
            assert abs(float(mine.double().mean()) - 499.5) < 5 * 289 / len(mine) ** 0.5
            assert mine.max() - mine.min() > 800


def test_ten_thousand_clients_of_four_domains_with_less_than_one_foreign_example_each():
    domains = torch.arange(60_000) % 4
    started = time.perf_counter()
    dealt = partition.by_domain(domains, 10_000, 0, heterogeneity=0.9)
    assert time.perf_counter() - started < 1
    assert set(dealt.sizes.tolist()) == {6}
    counts = torch.zeros(4, 4, dtype=torch.int64)
    of = dealt.home.repeat_interleave(dealt.sizes)
    counts.view(-1).index_add_(0, 4 * of + domains[dealt.indices], torch.ones(60_000, dtype=torch.int64))
    # Of each domain 1,500 are in the pool, of which every home takes a fourth.
    assert (counts - 13_500 * torch.eye(4, dtype=torch.int64) - 375).abs().max() < 5 * 375**0.5


def test_decimals_count_as_they_are_written():
    domains = torch.arange(2).repeat_interleave(100)

    def at_home(share: float) -> set[int]:
        return {
            int(held(partition.by_domain(domains, 2, seed, heterogeneity=share), domains).diagonal().sum())
            for seed in range(9)
        }

    assert 0.29 * 100 < 29
    assert at_home(0.29) == {2 * 29 + 2 * 35, 2 * 29 + 2 * 36}  # of the 71 others half, whoever gets the odd ones
    assert at_home(0.285) == {2 * 28 + 2 * 36}


def test_who_gets_the_only_foreign_example_is_drawn():
    domains = torch.arange(4).repeat_interleave(2) * 7  # domain numbers may have gaps
    found = set()
    for seed in range(30):
        dealt = partition.by_domain(domains, 4, seed, heterogeneity=0.5)
        assert dealt.home.tolist() == [0, 7, 14, 21]
        assert 0 in domains[dealt.indices[:2]]
        found.add(int(domains[dealt.indices[:2]].sum()))
    assert found == {0, 7, 14, 21}


def test_refusals_are_one_line(subtests):
    rows = [
        (lambda y: partition.by_domain(y, 4, 0, heterogeneity=1.1), "heterogeneity is 1.1: give a number from 0"),
        (lambda y: partition.by_domain(y, 4, 0, heterogeneity=-0.1), "heterogeneity is -0.1: give a number"),
        (lambda y: partition.by_domain(y, 4, 0, heterogeneity=math.nan), "heterogeneity is nan"),
        (lambda y: partition.by_domain(y, 13, 0, heterogeneity=0.5), "13 clients cannot share 12 examples"),
        (lambda y: partition.by_domain(y, 2, 0, heterogeneity=0), "2 clients cannot cover 3 domains"),
        (lambda y: partition.by_domain(0 * y, 4, 0, heterogeneity=0.5),
         "there are no two domains to mix: leave it out"),
        (lambda y: partition.by_domain(y % 2, 4, 0, [1], heterogeneity=0.5), "there are no two domains to mix"),
    ]  # fmt: skip
    all_say(subtests, lambda call: call(torch.arange(12) % 3), rows, ValueError)


def config(**given: object) -> schema.Config:
    return schema.load({"population": {"dataset": "digits", "clients": 6, "partition": {"kind": "by_domain", **given}}})


@pytest.mark.parametrize("value", [-0.5, 1.5, math.nan])
def test_a_configuration_outside_of_0_to_1_is_refused(value: float):
    with pytest.raises(ValidationError):
        PARTITIONS.make("by_domain", heterogeneity=value)
    tells(lambda: config(heterogeneity=value), "population.partition.heterogeneity")


@pytest.mark.parametrize(("value", "homes"), [(0, [0] * 6), (0.5, [0, 0, 0, 1, 1, 2]), (1, [0, 0, 0, 1, 1, 2])])
def test_a_client_is_of_the_domain_that_it_is_at_home_in(value: float, homes: list[int]):
    domain = torch.arange(3).repeat_interleave(torch.tensor([30, 20, 10]))
    examples = Examples(torch.zeros(60, 2), torch.arange(60) % 2, 2, domain)
    clients = population.make_population(config(heterogeneity=value), Dataset("made", examples, examples, tuple("abc")))
    assert clients.domains(torch.arange(6)).tolist() == homes
    held_of = [len(domain[rows].unique()) for rows in clients.indices.split(clients.offsets.diff().tolist())]
    assert [several > 1 for several in held_of] == [value < 1] * 6


def test_algorithms_that_weigh_domains_need_clients_that_are_at_home_somewhere():
    given = {
        "population": {"dataset": {"name": "digits", "label_domains": True}, "clients": 20},
        "task": {"name": "classification", "model": "logistic"}, "algorithm": {"name": "afl", "batch_size": 8},
        "executor": {"kind": "local"}, "cohort": {"size": 4},
    }  # fmt: skip
    mixed = {"population.partition": {"kind": "by_domain", "heterogeneity": 0.5}}
    domains = Experiment(schema.load(given, mixed)).problem.domains
    assert len(domains.examples) == 10
    config = schema.load(given, {"population.partition": {"kind": "by_domain", "heterogeneity": 0}})
    tells(lambda: Experiment(config), "clients hold examples of several domains")
