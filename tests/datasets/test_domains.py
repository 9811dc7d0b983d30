"""Domains: which clients make up one, and how a client of a domain is drawn."""

import math

import numpy as np
import pytest
import torch

from fedfleet.datasets import synthetic
from fedfleet.datasets.domain_config import ByLabel, Clusters, EachClient, Given, histograms
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.domains import Grouped
from fedfleet.simulator.population import InMemoryPopulation
from tests.refusals import tells


def people(*labels: list[int]) -> InMemoryPopulation:
    """Clients with these labels."""
    y = torch.tensor([label for mine in labels for label in mine])
    sizes = torch.tensor([0, *map(len, labels)])
    domain = torch.zeros(len(labels), dtype=torch.int64)
    return InMemoryPopulation({"x": torch.zeros(len(y), 2), "y": y}, torch.arange(len(y)), sizes.cumsum(0), domain)


MIXED = people([0, 0, 1], [0, 0, 0, 1], [1, 1], [2, 2, 2, 2, 2, 2], [2, 2, 1], [1, 1, 1])


def test_histograms():
    wanted = [[2, 1, 0], [3, 1, 0], [0, 2, 0], [0, 0, 6], [0, 1, 2], [0, 3, 0]]
    assert histograms(MIXED).tolist() == wanted


def test_kinds():
    everybody = torch.arange(6)
    assert Given().group(MIXED, 0) is MIXED
    assert EachClient().group(MIXED, 0).domains(everybody).tolist() == [0, 1, 2, 3, 4, 5]
    assert ByLabel().group(MIXED, 0).domains(everybody).tolist() == [0, 0, 1, 2, 2, 1]
    assert ByLabel().group(people([5, 5], [2], [5]), 0).domains(torch.arange(3)).tolist() == [1, 0, 1]


@pytest.mark.parametrize("distance", ["euclidean", "kl"])
def test_clusters_find_the_groups_there_are(distance):
    generator = np.random.default_rng(0)
    kinds = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.05, 0.05, 0.9]]
    clients = people(*([*generator.choice(3, 60, p=kinds[i % 3])] for i in range(60)))
    found = Clusters(count=3, distance=distance).group(clients, 0).domains(torch.arange(60))
    assert all(len(found[k::3].unique()) == 1 for k in range(3))
    assert len(found.unique()) == 3
    again = Clusters(count=3, distance=distance).group(clients, 0).domains(torch.arange(60))
    assert torch.equal(found, again)


@pytest.mark.parametrize("distance", ["euclidean", "kl"])
def test_small_clusters_are_merged_into_the_nearest(distance):
    clients = people(*[[0] * 30] * 4, *[[1] * 30] * 4, [1, 1, 1, 0])
    find = lambda **given: Clusters(count=3, distance=distance, **given).group(clients, 0).domains(torch.arange(9))  # noqa: E731
    assert len(find().unique()) == 3
    for given in ({"min_examples": 5}, {"max_skewness": 10.0}):
        found = find(**given)
        assert (len(found.unique()), found[8], sorted(found.unique().tolist())) == (2, found[4], [0, 1])
    assert len(find(min_examples=10_000).unique()) == 1


def test_clusters_of_vectors_see_neither_labels_nor_sizes():
    """Clients alike in their labels, of vectors around three points; small clusters go to the nearest point."""
    clients = people(*[[0, 1]] * 8, [0, 1, 0])
    vectors = np.array([[0.0, 0], [0.1, 0], [5, 5], [5.1, 5], [5, 5.1], [9, 9], [0, 0.1], [5, 4.9], [9.1, 9]])
    asked = []

    def found(**given):
        grouped = Clusters(count=3, **given).group(
            clients, 0, lambda kind, who: (asked.append((kind, who.size)), vectors)[1]
        )
        return grouped.domains(torch.arange(9)).tolist()

    a = found(by="gradient")
    assert ([len({a[i] for i in mine}) for mine in ([0, 1, 6], [2, 3, 4, 7], [5, 8])], len(set(a))) == ([1, 1, 1], 3)
    b = found(by="loss", min_examples=6)
    assert b[5] == b[8] == b[2] != b[0]
    assert asked == [("gradient", 9), ("loss", 9)]


def test_what_cannot_be_grouped_says_so():
    with pytest.raises(ValueError, match="distance=kl is between shares, and by=loss gives none"):
        Clusters(distance="kl", by="loss")
    tells(lambda: Clusters(count=2, by="gradient").group(MIXED, 0), "there is no model to take it at", ValueError)
    tells(lambda: Clusters(count=7).group(MIXED, 0), "there are only 6 clients", ValueError)
    law = synthetic.load(synthetic.SyntheticOptions(), 20, 0).population
    tells(lambda: ByLabel().group(law, 0), "use domains.kind given or client", ValueError)


def test_a_client_of_a_domain_is_drawn_by_its_examples():
    clients = people([0] * 5, [0] * 1, [0] * 3, [0] * 7, [0] * 2).grouped(torch.tensor([1, 0, 1, 0, 1]))
    domains = Grouped(5, 2, clients.domains, clients.num_examples)
    assert (domains.examples.tolist(), domains.of(torch.tensor([3, 4])).tolist()) == ([8, 10], [0, 1])
    wanted = torch.tensor([0, 1]).repeat(10_000)
    drawn = domains.draw(wanted, rng.key(0))
    assert torch.equal(clients.domains(drawn), wanted)
    for client, share in ((0, 0.5), (1, 1 / 8), (2, 0.3), (3, 7 / 8), (4, 0.2)):
        found = float((drawn == client).double().mean()) * 2
        assert found == pytest.approx(share, abs=4.5 * math.sqrt(share * (1 - share) / 10_000))


def test_synthetic_clients_of_a_domain_share_their_concept():
    """What a model learns of one client of a domain helps with another, and with none of another domain."""
    options = synthetic.SyntheticOptions(features=8, classes=3, examples=400, alpha=4.0, beta=0.0, domains=5)
    law = synthetic.load(options, 20, 0).population
    assert (law.domains(torch.arange(12)).tolist(), law.summary().domains) == ([0, 1, 2, 3, 4] * 2 + [0, 1], 5)
    data = law.local_data(torch.tensor([0, 5, 1]))
    x, y = data.data["x"].double(), data.data["y"]
    mine = [(x[data.rows[i]], y[data.rows[i]]) for i in range(3)]
    weights = torch.linalg.lstsq(mine[0][0], torch.nn.functional.one_hot(mine[0][1], 3).double()).solution
    right = [float(((a @ weights).argmax(1) == b).double().mean()) for a, b in mine]
    assert right[1] > right[2] + 0.2


def test_synthetic_clients_without_domains_are_what_they_were():
    law = synthetic.load(synthetic.SyntheticOptions(features=4, classes=3, examples=3), 5, 0).population
    assert law.local_data(torch.tensor([3])).domain.tolist() == [0]
    assert law.grouped(torch.arange(5)).local_data(torch.tensor([3])).domain.tolist() == [3]
    a, b = (p.local_data(torch.tensor([3])).data["x"] for p in (law, law.grouped(torch.arange(5))))
    assert torch.equal(a, b)
