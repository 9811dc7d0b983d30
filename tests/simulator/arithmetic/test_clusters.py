"""k-means: rows by their mass, means of the nearest, and clusters that are empty."""

from __future__ import annotations

import torch
from torch.func import vmap

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.clusters import centres, k_means, members, pick, seeded

LINE = torch.tensor([0.0, 4.0, 10.0, 50.0, 12.0], dtype=torch.float64)[:, None]
COUNTS = torch.tensor([True, True, True, False, True])


def test_rows_are_picked_by_their_mass():
    u = torch.tensor([0.0, 0.2499, 0.25, 0.9999])
    assert pick(u, torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])).tolist() == [1, 1, 3, 3]
    assert pick(u[1:3], torch.tensor([[1, 0, 3], [0, 2, 2]])).tolist() == [0, 1]


def test_seeds_are_points_that_count_and_none_comes_twice():
    for seed in range(30):
        seeds, apart = seeded(rng.key(seed), LINE, COUNTS, 4)
        assert sorted(seeds[:, 0].tolist()) == [0, 4, 10, 12]
        assert apart[:, 0].tolist() == (seeds[:, 0] ** 2).tolist()
        assert apart[:, 3].tolist() == [0, 0, 0, 0]


def test_the_nearest_and_the_first_of_equal_ones():
    apart = torch.tensor([[1.0, 2, 3], [1, 1, 4], [0, 5, 3]])
    assert members(apart, torch.tensor([True, True, True])).tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert members(apart, torch.tensor([True, False, True])).tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


def test_an_empty_cluster_stays_where_it_was():
    member = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    assert centres(member, LINE, torch.tensor([[7.0], [8.0]]).double())[:, 0].tolist() == [2, 8]


def test_lloyds_steps_lead_to_the_groups_from_any_seeds():
    """Two seeds in one group part at the next step; without a step one stays alone."""
    keys = rng.fold(rng.key(1), torch.arange(200))
    found = vmap(lambda key: k_means(key, LINE, COUNTS, 2, 10))(keys)
    groups = {tuple(map(tuple, sorted(row))) for row in found.long().tolist()}
    assert groups == {((0, 0, 1, 0, 1), (1, 1, 0, 0, 0))}
    none = vmap(lambda key: k_means(key, LINE, COUNTS, 2, 0))(keys)
    assert (none.sum(2) == 1).any()
