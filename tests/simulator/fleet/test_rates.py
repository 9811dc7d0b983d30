"""Rules of clients' rates: the values of the specification, and the laws of what is drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.online import rates
from fedfleet.simulator.fleet.online.labels import Labels
from fedfleet.simulator.population import InMemoryPopulation
from tests.refusals import refused

KEY = rng.key(5)
MANY = 40_000
LABELS = [[0] * 8 + [1] * 2, [3] * 5, list(range(10))]
"""Label shares (.8, .2, 0, ...), all of class 3, and uniform."""


def holding(labels: list[list[int]], name: str = "y") -> InMemoryPopulation:
    sizes = torch.tensor([0, *map(len, labels)]).cumsum(0)
    y = torch.tensor([k for mine in labels for k in mine])
    return InMemoryPopulation({name: y}, torch.arange(len(y)), sizes, torch.zeros(len(labels), dtype=torch.int64))


def told(rule: Any, clients: int = 3) -> list[float]:
    return rule(torch.arange(clients)).tolist()


def moments(found: Tensor, mean: float, variance: float) -> None:
    """Check mean and variance of independent draws within 4 standard deviations."""
    n = len(found)
    assert abs(float(found.mean()) - mean) < 4 * math.sqrt(variance / n)
    fourth = float((found - mean).pow(4).mean())
    assert abs(float((found - mean).square().mean()) - variance) < 4 * math.sqrt(max(fourth - variance**2, 0) / n)


def test_rules_by_labels_have_the_values_of_the_specification(monkeypatch):
    labels = Labels(holding(LABELS), "key")
    assert labels.classes == 10
    kappa = torch.tensor([0.5, 0.3, 0.2] + [0.0] * 7, dtype=torch.float64)
    monkeypatch.setattr(rates, "dirichlet", lambda key, size, concentration: kappa)
    assert told(rates.fedau(KEY, labels, 0.1, 0.02, 0.1)) == pytest.approx([0.46, 0.02, 0.1])
    assert told(rates.fedau(KEY, labels, 0.5, 0.3, 0.1)) == pytest.approx([1.0, 0.3, 0.5])  # not above 1
    phi = torch.tensor([0.9, 0.2, 0.4, 0.7, 0.5, 0.1, 0.3, 0.45, 0.05, 0.25], dtype=torch.float64)
    monkeypatch.setattr(rates, "phi", lambda key, classes: phi)
    assert told(rates.fedawe(KEY, labels)) == pytest.approx([0.76, 0.7, 0.385])
    assert told(rates.mifa(Labels(holding(LABELS), "key"), 0.1)) == pytest.approx([0.1, 0.1 + 0.9 * 3 / 9, 0.1])


def test_rates_are_of_a_client_alone_and_its_numbers_in_any_order():
    labels = Labels(holding(LABELS), "key")
    three = torch.arange(3)
    for rule in (
        rates.fedau(KEY, labels, 0.1, 0.0, 0.5), rates.fedawe(KEY, labels), rates.uniform(KEY, 0.1, 1.0), rates.beta(KEY, 0.3, 2.0),
    ):  # fmt: skip
        whole = rule(three)
        assert torch.equal(rule(three.flip(0)).flip(0), whole)
        assert [float(rule(three[i : i + 1])) for i in range(3)] == whole.tolist()
    other = rates.uniform(rng.key(6), 0.1, 1.0)
    assert not torch.equal(other(three), rates.uniform(KEY, 0.1, 1.0)(three))


@pytest.mark.slow
def test_weights_of_classes_have_their_laws():
    """Of ten classes with concentration 0.1; a client at FedAU's floor of 0.02 is no exception."""
    keys = rng.fold(KEY, torch.arange(2000))
    kappa, nu = (torch.stack([rates.dirichlet(rng.fold(k, what), 10, 0.1) for k in keys]) for what in ("kappa", "nu"))
    torch.testing.assert_close(kappa.sum(1), torch.ones(2000, dtype=torch.float64))
    for k in range(10):
        moments(kappa[:, k], 0.1, 0.1 * 0.9 / 2)
    p = (kappa * nu).sum(1)
    moments(p, 0.1, 0.15**2)
    assert float((p < 0.02).double().mean()) == pytest.approx(0.4, abs=4 * math.sqrt(0.24 / 2000))
    assert float(p.clamp(min=0.02).mean()) == pytest.approx(0.1054, abs=4 * 0.15 / math.sqrt(2000))
    phi = torch.stack([rates.phi(k, 9) for k in keys[:1000]])
    moments(phi[:, :4].flatten(), 0.5, 1 / 12)
    moments(phi[:, 4:].flatten(), 0.25, 1 / 48)


def test_fedawes_rates_are_three_eighths_on_average():
    """Over label shares and weights of ten classes, five of mean 1/2 and five of mean 1/4."""
    keys = rng.fold(KEY, torch.arange(1000))
    each = torch.stack([rates.phi(k, 10) for k in keys])
    assert float(each.mean()) == pytest.approx(0.375, abs=4 * float(each.mean(1).std()) / math.sqrt(1000))
    shares = torch.stack([rates.dirichlet(rng.fold(k, "nu"), 10, 0.1) for k in keys])
    p = (each * shares).sum(1)
    assert float(p.mean()) == pytest.approx(0.375, abs=4 * float(p.std()) / math.sqrt(1000))


@pytest.mark.parametrize(("a", "b"), [(2.0, 2.0), (0.05, 0.1), (5.0, 0.5), (1.0, 1.0), (1e-3, 1e-3), (900.0, 100.0)])
def test_beta_rates_have_their_moments(a, b):
    found = rates.beta(KEY, a, b)(torch.arange(MANY))
    mean = a / (a + b)
    moments(found, mean, mean * (1 - mean) / (a + b + 1))
    assert bool(((found >= 0) & (found <= 1)).all())
    if a == b == 1:  # uniform
        cells = (found * 10).long().clamp(max=9).bincount(minlength=10).double()
        assert float(((cells - MANY / 10) ** 2 / (MANY / 10)).sum()) < 28  # chi-square, 9 degrees: 1e-3


@pytest.mark.parametrize("shape", [0.3, 1.0, 7.5])
def test_gamma_draws_have_their_moments(shape):
    moments(rates.log_gamma(rng.fold(KEY, torch.arange(MANY)), shape).exp(), shape, shape)


def test_uniform_and_constant_rates():
    found = rates.uniform(KEY, 0.2, 0.8)(torch.arange(MANY))
    moments(found, 0.5, 0.6**2 / 12)
    assert float(found.min()) >= 0.2
    assert float(found.max()) < 0.8
    assert told(rates.constant(0.3)) == [0.3] * 3


def test_rates_by_sizes_fall_with_what_clients_hold():
    assert told(rates.sizes(holding(LABELS))) == pytest.approx([0.5, 1.0, 0.5])


def test_examples_without_labels_do_not_count():
    """A label of -1 is none; a client with nothing else is as one that holds the largest class alone."""
    labels = Labels(holding([[2, -1, -1], [-1], [0, 4]]), "key")
    values = torch.tensor([10.0, 0, 6, 0, 2], dtype=torch.float64)
    assert told(labels.mean_of(values)) == [6.0, 0.0, 6.0]
    assert told(labels.least()) == [2.0, 4.0, 0.0]


def test_populations_without_class_numbers_are_refused():
    refused(lambda: Labels(holding(LABELS, "x"), "availability.rates.kind='mifa'"), "availability.rates.kind='mifa'")
