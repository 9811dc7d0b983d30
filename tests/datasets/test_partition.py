"""Partitions: what every one has to hold, and what each kind promises."""

import bisect
import itertools
import time
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedfleet.commands.docstrings import described
from fedfleet.datasets import partition
from fedfleet.datasets.partition import Partition
from fedfleet.datasets.partition_config import PARTITIONS, PartitionConfig
from tests.refusals import all_say, tells

AnyKind: TypeAdapter[PartitionConfig] = TypeAdapter(Annotated[Any, PARTITIONS])

labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(torch.tensor)
seeds = st.integers(0, 2**40)


def split(config: Mapping[str, Any], labels: Tensor, clients: int, seed: int = 0) -> Partition:
    return AnyKind.validate_python(dict(config)).split(labels, labels, clients, seed, (0,))


def blocks(dealt: Partition) -> list[Tensor]:
    return list(torch.split(dealt.indices, dealt.sizes.tolist()))


def assert_sound(dealt: Partition, examples: int, clients: int) -> None:
    assert dealt.indices.dtype == dealt.offsets.dtype == torch.int64
    assert (dealt.offsets.shape, dealt.offsets[0]) == ((clients + 1,), 0)
    assert dealt.offsets[-1] == len(dealt.indices)
    assert dealt.sizes.min() >= 0
    assert dealt.indices.unique().numel() == dealt.indices.numel()
    assert dealt.indices.min() >= 0
    assert dealt.indices.max() < examples


def assert_all_dealt(dealt: Partition, examples: int) -> None:
    assert torch.equal(dealt.indices.sort().values, torch.arange(examples))


# What every kind holds
@given(labels=labels_of, data=st.data(), seed=seeds, similarity=st.floats(0, 1))
def test_equal_blocks_drop_only_the_remainder(labels: Tensor, data, seed: int, similarity: float):
    clients = data.draw(st.integers(1, len(labels)))
    for config in ({"kind": "iid"}, {"kind": "label_sorted", "similarity": similarity}):
        dealt = split(config, labels, clients, seed)
        assert_sound(dealt, len(labels), clients)
        assert set(dealt.sizes.tolist()) == {len(labels) // clients}


@given(
    labels=labels_of, data=st.data(), seed=seeds, alpha=st.floats(1e-3, 1e6),
    kind=st.sampled_from(["dirichlet", "quantity_skew"]),
)  # fmt: skip
def test_dirichlet_kinds_deal_everything(labels: Tensor, data, seed: int, alpha: float, kind: str):
    clients = data.draw(st.integers(1, len(labels)))
    dealt = split({"kind": kind, "alpha": alpha, "min_size": 0}, labels, clients, seed)
    assert_sound(dealt, len(labels), clients)
    assert_all_dealt(dealt, len(labels))


@given(per_shard=st.integers(1, 5), clients=st.integers(1, 8), n=st.integers(1, 4), seed=seeds, data=st.data())
def test_shards_deal_everything_in_runs_of_the_sorted_order(per_shard, clients, n, seed, data):
    size = per_shard * clients * n
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    dealt = split({"kind": "shards", "labels_per_client": n}, labels, clients, seed)
    assert_sound(dealt, size, clients)
    assert_all_dealt(dealt, size)
    assert set(dealt.sizes.tolist()) == {per_shard * n}
    shards = {tuple(shard.tolist()) for shard in labels.argsort(stable=True).reshape(-1, per_shard)}
    assert {tuple(shard.tolist()) for shard in dealt.indices.reshape(-1, per_shard)} == shards


@given(domains=labels_of, data=st.data(), seed=seeds)
def test_by_domain_keeps_clients_within_a_domain(domains: Tensor, data, seed: int):
    kinds, totals = domains.unique(return_counts=True)
    clients = data.draw(st.integers(len(kinds), len(domains)))
    dealt = split({"kind": "by_domain"}, domains, clients, seed)
    assert_sound(dealt, len(domains), clients)
    assert_all_dealt(dealt, len(domains))
    homes = [domains[block].unique() for block in blocks(dealt)]
    assert all(len(home) == 1 for home in homes)
    for kind, total in zip(kinds, totals, strict=True):
        sizes = dealt.sizes[torch.cat(homes) == kind]
        assert len(sizes) >= 1
        assert sizes.max() - sizes.min() <= 1
        quota = clients * int(total) / len(domains)
        assert len(sizes) < max(1, quota) + 1  # never above the largest remainder's share


CONFIGS = [
    {"kind": "iid"}, {"kind": "label_sorted", "similarity": 0.5}, {"kind": "dirichlet"}, {"kind": "shards"},
    {"kind": "quantity_skew"}, {"kind": "by_domain"}, {"kind": "domain_share", "share": 0.75},
    *({"kind": k} for k in ("pathological", "distribution", "inner_dirichlet", "linear", "square", "exponential")),
]  # fmt: skip
OF_FEW = {"square": 8, "exponential": 5}
"""Clients where the smallest would have nothing of 240 examples among 12."""


def test_the_seed_decides(subtests):
    for config in (*CONFIGS, {"kind": "label_sorted"}):
        clients = OF_FEW.get(config["kind"], 12)
        first, again, other = (split(config, torch.arange(240) % 6, clients, seed) for seed in (3, 3, 4))
        with subtests.test(f"{config}"):
            assert all(map(torch.equal, (first.indices, first.offsets), (again.indices, again.offsets)))
            assert torch.equal(first.indices, other.indices) != AnyKind.validate_python(dict(config)).draws


def test_every_kind_is_configured_and_tested():
    assert list(PARTITIONS) == [*(config["kind"] for config in CONFIGS), "file"]


def test_more_clients_than_examples(subtests):
    rows = [((config, n), f"{n} clients … 7 examples … 1 to 7") for config in CONFIGS for n in (0, 8)]
    all_say(subtests, lambda row: split(row[0], torch.arange(7) % 2, row[1]), rows, ValueError)


@pytest.mark.parametrize("config", [
    {"kind": "dirichlet", "min_size": 0}, {"kind": "distribution", "least": 1},
    *(c for c in CONFIGS if c["kind"] not in {"dirichlet", "distribution", "inner_dirichlet", "linear", *OF_FEW}),
], ids=lambda c: c["kind"])  # fmt: skip
def test_ten_thousand_clients_take_well_under_a_second(config: dict[str, Any]):
    labels = torch.arange(60_000) % 10
    started = time.perf_counter()
    if config["kind"] == "quantity_skew":
        config = config | {"min_size": 0}
    dealt = split(config, labels, 10_000)
    assert time.perf_counter() - started < 1
    assert_sound(dealt, 60_000, 10_000)


# What one kind promises
def longest_rise(values: list[int]) -> int:
    """The length of the longest increasing subsequence, by patience sorting."""
    tails: list[int] = []
    for value in values:
        at = bisect.bisect_left(tails, value)
        tails[at : at + 1] = [value]
    return len(tails)


@given(st.integers(1, 100), st.integers(0, 10), seeds)
def test_label_sorted_similarity_sorts_the_rest(examples: int, tenths: int, seed: int):
    dealt = partition.label_sorted(torch.arange(examples), 1, seed, similarity=tenths / 10)
    sorted_ = -(-examples * (10 - tenths) // 10)
    assert longest_rise(dealt.indices.tolist()) >= sorted_


def test_label_sorted_counts_in_decimals():
    # (1 - 0.7) * 10 is 3.0000000000000004 in binary; with its ceiling, 4, no order could rise by 3 only.
    orders = [partition.label_sorted(torch.arange(10), 1, seed, 0.7).indices.tolist() for seed in range(200)]
    assert min(longest_rise(order) for order in orders) == 3


def test_label_sorted_random_share_is_uniform_over_places_and_examples():
    examples, similarity = 20_000, 0.3
    labels = torch.arange(examples) // (examples // 2)  # two classes, so a one in the first places was put there
    order = partition.label_sorted(labels, 1, 0, similarity).indices
    ones = labels[order][: examples // 4].double().mean()
    assert ones == pytest.approx(similarity / 2, abs=0.02)
    zeros = 1 - labels[order][-examples // 4 :].double().mean()
    assert zeros == pytest.approx(similarity / 2, abs=0.02)


def test_dirichlet_alpha_tells_the_skew():
    labels = torch.arange(50_000) % 10

    def classes_held(alpha: float) -> float:
        dealt = partition.dirichlet(labels, 50, 0, alpha, min_size=0)
        return float(np.mean([len(labels[block].unique()) for block in blocks(dealt)]))

    assert classes_held(0.01) < 3 < classes_held(0.3) < classes_held(100) == 10


def test_dirichlet_proportions_have_the_right_spread():
    """The share of a class has the variance of a Dirichlet margin, (1/N)(1 - 1/N) / (N alpha + 1)."""
    clients, alpha = 20, 0.5
    labels = torch.arange(1_000_000) % 100
    dealt = partition.dirichlet(labels, clients, 0, alpha)
    shares = torch.stack([labels[block].bincount(minlength=100) for block in blocks(dealt)]) / 10_000
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert float(shares.var()) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("kind", ["dirichlet", "quantity_skew"])
def test_min_size_holds_or_says_why_not(kind: str):
    labels = torch.arange(1000) % 10
    dealt = split({"kind": kind, "alpha": 1, "min_size": 20}, labels, 10)
    assert dealt.sizes.min() >= 20
    with pytest.raises(ValueError, match=r"alpha=0\.001.* 100 clients min_size=5 examples: raise alpha"):
        split({"kind": kind, "alpha": 0.001, "min_size": 5}, labels, 100)
    tells(lambda: split({"kind": kind, "min_size": 101}, labels, 10), "min_size is 101", ValueError)


def test_dirichlet_gives_up_within_seconds():
    started = time.perf_counter()
    with pytest.raises(ValueError, match="10000 clients min_size=1 examples"):
        partition.dirichlet(torch.arange(60_000) % 10, 10_000, 0, 0.1)
    assert time.perf_counter() - started < 5


def test_quantity_skew_labels_are_iid():
    labels = (torch.arange(100_000) // 10_000).long()
    dealt = partition.quantity_skew(labels, 4, 0, alpha=5)
    for block in blocks(dealt):
        shares = labels[block].bincount(minlength=10) / len(block)
        torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.02, rtol=0)
    assert dealt.sizes.max() > 1.2 * dealt.sizes.min()


@pytest.mark.parametrize(("totals", "clients", "expected"), [
    ([60, 30, 10], 10, [6, 3, 1]), ([98, 1, 1], 10, [8, 1, 1]), ([47, 16, 16, 21], 10, [5, 2, 1, 2]),
    ([1, 1], 2, [1, 1]),
])  # fmt: skip
def test_by_domain_apportions_by_largest_remainder(totals: list[int], clients: int, expected: list[int]):
    domains = torch.arange(len(totals)).repeat_interleave(torch.tensor(totals)) * 7  # domain numbers may have gaps
    dealt = partition.by_domain(domains, clients, 0)
    homes = torch.stack([domains[block[0]] for block in blocks(dealt)]) // 7
    assert homes.bincount().tolist() == expected


# What is refused
def test_refusals_are_one_line_with_the_number(subtests):
    y = torch.arange(12) % 3
    rows = [
        (lambda: partition.label_sorted(y, 2, 0, 1.5), "similarity is 1.5"),
        (lambda: partition.label_sorted(y, 2, 0, float("nan")), "similarity is nan"),
        (lambda: partition.dirichlet(y, 2, 0, 0.0), "alpha is 0.0"),
        (lambda: partition.quantity_skew(y, 2, 0, -1.0), "alpha is -1.0"),
        (lambda: partition.dirichlet(y, 2, 0, float("inf")), "alpha is inf"),
        (lambda: partition.shards(y, 2, 0, 0), "labels_per_client is 0"),
        (lambda: partition.shards(y, 4, 0, 2), "12 examples … 4 clients x 2 … clients that does is 3"),
        (lambda: partition.shards(y, 2, 0, 5), "choose a labels_per_client"),
        (lambda: partition.by_domain(y, 2, 0), "2 clients cannot cover 3 domains"),
        (lambda: partition.iid(y, 2, -1), "seed is -1"),
        *((lambda given=given: partition.by_domain(torch.arange(9) % 3, given[0], 0, *given[1:]), says) for given,
         says in (((3, [1], 2), "1 clients cannot cover 2 sources"),
         ((4, [0, 1], 1), "1 clients cannot cover 2 target domains"), ((5, [7], 1), "there are no target domains"),
         ((5, [0, 1, 2], 4), "there are no sources"), ((8, [1], 1), "7 clients cannot share 6 examples of sources"),
         ((7, [1], 4), "4 clients cannot share 3 examples of target domains"))),
        (lambda: PARTITIONS.make("by_domain", target_clients=2).split(y, y, 5, 0), "target_clients is 2"),
        (lambda: partition.by_domain(y, 4, 0, equal=True), "4 clients … 3 domains: ask for 3"),
        (lambda: partition.by_domain(y, 6, 0, [1], 1, equal=True), "5 clients … 2 sources: ask for 4"),
        (lambda: partition.by_domain(torch.tensor([0] * 9 + [1] * 2), 6, 0, equal=True), "3 clients … 2 examples"),
        (lambda: PARTITIONS.make("by_domain").split(y, None, 2, 0), "no domains"),
    ]  # fmt: skip
    all_say(subtests, lambda make: make(), rows, ValueError)


def test_a_target_may_be_whole_while_sources_are_cut():
    domains = torch.tensor([0] * 12 + [1] * 20 + [2] * 9)
    dealt = partition.by_domain(domains, 9, 3, targets=[1], target_clients=1)
    assert dealt.offsets.diff().tolist() == [3, 3, 2, 2, 2, 20, 3, 3, 3]
    assert [set(domains[c].tolist()) for c in dealt.indices.split(dealt.offsets.diff().tolist())] == [
        *[{0}] * 5,
        {1},
        *[{2}] * 3,
    ]
    assert sorted(dealt.indices.tolist()) == list(range(41))
    config = PARTITIONS.make("by_domain", target_clients=1)
    again = config.split(torch.zeros(41), domains, 9, 3, [1])
    assert torch.equal(again.indices, dealt.indices)


def test_domains_may_have_as_many_clients_whatever_their_examples():
    """FACT's Figure 2b: four sources, of which USPS is small, in ten clients each, and one target."""
    domains = torch.arange(5).repeat_interleave(torch.tensor([2500, 2500, 2500, 2500, 744]))
    config = PARTITIONS.make("by_domain", target_clients=1, equal=True)
    dealt = config.split(torch.zeros(len(domains)), domains, 41, 3, [1])
    assert dealt.home is not None
    assert dealt.home.bincount().tolist() == [10, 1, 10, 10, 10]
    assert sorted(dealt.sizes[-10:].tolist()) == [74] * 6 + [75] * 4
    assert_all_dealt(dealt, len(domains))
    assert partition.by_domain(domains, 41, 3, [1], 1).home.bincount().tolist() == [12, 1, 12, 12, 4]  # pyright: ignore
    assert partition.by_domain(domains, 10, 3, equal=True).home.bincount().tolist() == [2] * 5  # pyright: ignore


def test_configuration_refuses(subtests):
    rows = [
        {"kind": "iid", "alpha": 1.0}, {"kind": "label_sorted", "similarity": -0.1}, {"kind": "dirichlet", "alpha": 0},
        {"kind": "dirichlet", "alpha": float("inf")}, {"kind": "dirichlet", "min_size": -1},
        {"kind": "shards", "labels_per_client": 0}, {"kind": "quantity_skew", "alpha": -1}, {"kind": "by_domian"},
        {"kind": "by_domain", "equal": True, "heterogeneity": 0},
    ]  # fmt: skip
    for config in rows:
        with subtests.test(f"{config}"), pytest.raises(ValidationError):
            AnyKind.validate_python(config)


def test_every_setting_says_what_it_is():
    for entry in PARTITIONS.values():
        assert all(described(entry.options, name) for name in entry.options.model_fields)


@pytest.mark.parametrize(
    ("sizes", "per_client", "dropped", "most"),
    [
        ([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], 120, 0, 2),  # MNIST
        ([6000] * 10, 120, 0, 1),  # Fashion-MNIST
        ([5000] * 10, 100, 0, 1),  # CIFAR-10
        ([16] * 10173 + [2], 325, 270, None),  # CelebA, of which only the number of examples matters
    ],
)
def test_cdmas_blocks(sizes, per_client, dropped, most):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    split = PARTITIONS.make("label_sorted").split(labels, None, 500, 0)
    order = labels[split.indices]
    assert torch.equal(order, labels.sort().values[: len(order)])
    assert (split.indices.diff()[order.diff() == 0] > 0).all()  # the sort is stable: file order within a class
    counts = split.offsets.diff()
    assert (counts.unique().tolist(), len(labels) - int(counts.sum())) == ([per_client], dropped)
    if most is not None:
        mine = [labels[split.indices[a:b]].unique() for a, b in itertools.pairwise(split.offsets.tolist())]
        assert max(map(len, mine)) == most
        assert sum(len(classes) > 1 for classes in mine) <= 9
