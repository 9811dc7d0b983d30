"""Source and target domains dealt to two groups of clients by a share."""

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.datasets import partition
from fedfleet.datasets.partition import Partition
from tests.refusals import all_say

seeds = st.integers(0, 2**40)


def blocks(dealt: Partition) -> list[Tensor]:
    return list(torch.split(dealt.indices, dealt.sizes.tolist()))


domains_of = st.lists(st.integers(0, 3), min_size=30, max_size=120).map(lambda rest: torch.tensor([0, 1, 2, 3, *rest]))
of_four = st.sets(st.integers(0, 3), min_size=1, max_size=3)


@given(
    domains=domains_of, targets=of_four, seed=seeds, percent=st.integers(0, 100), a=st.integers(1, 4),
    b=st.integers(1, 4),
)  # fmt: skip
def test_domain_share_gives_groups_their_shares_and_clients_the_same(domains, targets, seed, percent, a, b):
    counts = domains.bincount(minlength=4).tolist()
    shares = [n * (100 - percent if k in targets else percent) // 100 for k, n in enumerate(counts)]
    assume(sum(shares) >= a and len(domains) - sum(shares) >= b)
    dealt = partition.domain_share(domains, targets, a + b, seed, percent / 100, (a, b))
    assert dealt.offsets.shape == (a + b + 1,)
    assert torch.equal(dealt.indices.sort().values, torch.arange(len(domains)))
    held = torch.stack([domains[block].bincount(minlength=4) for block in blocks(dealt)])
    assert held[:a].sum(0).tolist() == shares
    for group in (held[:a], held[a:]):
        assert (group.max(0).values - group.min(0).values).max() <= 1
        assert group.sum(1).max() - group.sum(1).min() <= 1


def test_domain_share_at_its_ends_and_in_the_middle():
    domains = torch.arange(3).repeat_interleave(torch.tensor([40, 20, 20]))
    sources, target = partition.domain_share(domains, [2], 2, 0, 1.0).indices.tensor_split([60])
    assert (domains[sources] < 2).all()
    assert (domains[target] == 2).all()
    target, sources = partition.domain_share(domains, [2], 2, 0, 0).indices.tensor_split([20])
    assert (domains[target] == 2).all()
    assert partition.domain_share(domains, [2], 2, 0, 0.5).sizes.tolist() == [40, 40]
    assert partition.domain_share(domains, [0, 1], 5, 0, 0.9).sizes.tolist() == [8, 8, 8, 28, 28]
    assert partition.domain_share(domains, [1], 6, 0, 1.0, (2, 4)).sizes.tolist() == [30, 30, 5, 5, 5, 5]


def test_domain_share_draws_whom_it_deals():
    domains = torch.zeros(1000, dtype=torch.int64)
    domains[500:] = 1
    dealt = partition.domain_share(domains, [1], 4, 0, 0.5)
    for block in blocks(dealt):
        mine = block[block < 500].double()
        assert abs(float(mine.mean()) - 249.5) < 5 * 144 / 125**0.5
        assert mine.max() - mine.min() > 300
    again = partition.domain_share(domains, [1], 4, 0, 0.5)
    assert torch.equal(dealt.indices, again.indices)
    assert not torch.equal(dealt.indices, partition.domain_share(domains, [1], 4, 1, 0.5).indices)


def test_domain_share_counts_in_decimals():
    domains = torch.arange(2).repeat_interleave(10)
    for tenths in range(11):
        dealt = partition.domain_share(domains, [1], 2, 0, tenths / 10)
        assert domains[blocks(dealt)[0]].bincount(minlength=2).tolist() == [tenths, 10 - tenths]


def test_refusals_are_one_line_with_the_number_and_the_mend(subtests):
    rows = [
        (lambda y: partition.domain_share(y, [0], 2, 0, 1.1), "share is 1.1: give a share"),
        (lambda y: partition.domain_share(y, [0], 2, 0, -0.1), "share is -0.1: give a share"),
        (lambda y: partition.domain_share(y, [0], 2, 0, math.nan), "share is nan: give a share"),
        (lambda y: partition.domain_share(y, [], 2, 0, 1.0), "0 of 3 domains are targets: give one"),
        (lambda y: partition.domain_share(y, [0, 1, 2], 2, 0, 1.0), "3 of 3 domains are targets: … leave a source"),
        (lambda y: partition.domain_share(y, [0, 3], 2, 0, 1.0), "no example is of the target domain 3: … [0, 1, 2]"),
        (lambda y: partition.domain_share(y, [0], 1, 0, 1.0), "sides are [1, 0]: give two numbers … up to 1 clients"),
        (lambda y: partition.domain_share(y, [0], 3, 0, 1.0, (1, 1)), "sides are [1, 1]: … add up to 3 clients"),
        (lambda y: partition.domain_share(y, [0], 3, 0, 1.0, (3, 0)), "sides are [3, 0]"),
        (lambda y: partition.domain_share(y, [0], 12, 0, 1.0), "6 clients of a group cannot share 4 examples"),
    ]  # fmt: skip
    all_say(subtests, lambda call: call(torch.arange(12) % 3), rows, ValueError)
