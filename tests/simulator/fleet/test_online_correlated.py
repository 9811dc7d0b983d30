"""Availability that depends on the data: the mean rate is kept, and it goes with labels and sizes as it says."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfleet.config.availability import AVAILABILITY, Context
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.online import labels
from fedfleet.simulator.fleet.online.correlated import Correlated, by_label
from fedfleet.simulator.fleet.online.labels import CALIBRATED_ON, calibration_clients
from fedfleet.simulator.population import InMemoryPopulation, LocalData, Summary
from tests.refusals import all_refused

PHASE = rng.key(4)


def population(labels: list[list[int]]) -> InMemoryPopulation:
    """Clients that hold examples of these classes; rows lie scattered."""
    flat = torch.tensor([y for mine in labels for y in mine])
    order = rng.permutation(rng.key(1), len(flat))
    offsets = torch.tensor([0, *(len(mine) for mine in labels)]).cumsum(0)
    where = torch.empty_like(order)
    where[order] = torch.arange(len(order))
    data = {"x": torch.zeros(len(flat), 1), "y": flat[order]}
    return InMemoryPopulation(data, where, offsets, torch.zeros(len(labels), dtype=torch.int64))


def build(kind: str, clients: Any, **given: Any) -> Correlated:
    made = AVAILABILITY[kind].build(AVAILABILITY[kind].options(**given), Context(rng.key(5), clients))
    assert isinstance(made, Correlated)
    return made


def online(model: Any, clients: Tensor, phase: int = 0) -> Tensor:
    return model.online(rng.fold(PHASE, phase), clients, torch.zeros(len(clients), dtype=torch.float64))


MIXED = [[0], [9, 9], [0, 9], [3, 4, 5], [1] * 7 + [9], [2], [8, 7]]


def test_propensity_by_mean_class_number_worked_out_by_hand():
    s = build("label_correlated", population(MIXED)).propensity(torch.arange(7))
    means = [0, 9, 4.5, 4, 2, 2, 7.5]
    assert s.tolist() == pytest.approx([2 * m / 9 - 1 for m in means], abs=1e-15)


def test_propensity_by_classes_worked_out_by_hand():
    s = build("label_correlated", population(MIXED), classes=[9, 0, 9]).propensity(torch.tensor([6, 4, 0, 1, 2]))
    assert s.tolist() == pytest.approx([1, 1 - 2 / 8, -1, -1, -1], abs=1e-15)


def test_propensity_by_size_is_the_rank():
    s = build("size_correlated", population([[0] * n for n in (1, 5, 5, 1000, 2)])).propensity(torch.arange(5))
    assert s.tolist() == pytest.approx([-0.8, 0.2, 0.2, 0.8, -0.4], abs=1e-15)  # ties share a rank; the mean is 0


@given(
    labels=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=12),
    rate=st.floats(0.001, 0.999),
    strength=st.floats(-50, 50),
    kind=st.sampled_from(["label_correlated", "size_correlated"]),
)
def test_the_mean_over_the_clients_is_the_rate(labels, rate, strength, kind):
    labels = [*labels, [4]]
    model = build(kind, population(labels), rate=rate, strength=strength)
    clients = torch.arange(len(labels))
    chances = model.rate(clients)
    assert float(chances.mean()) == pytest.approx(rate, rel=1e-9)
    s = model.propensity(clients)
    assert float(s.abs().max()) <= 1
    order = s.argsort()
    assert (chances[order].diff() * math.copysign(1, strength) >= -1e-15).all()
    logit = torch.logit(chances)
    sure = (chances > 1e-6) & (chances < 1 - 1e-6)
    assert torch.allclose(logit[sure], model.intercept + strength * s[sure], atol=1e-6)


def test_each_client_is_online_at_its_rate_afresh_in_every_phase():
    model = build("label_correlated", population([[i % 5] for i in range(1000)]), rate=0.4, strength=3.0)
    seen = torch.stack([online(model, torch.arange(1000), phase) for phase in range(200)]).double()
    chances = model.rate(torch.arange(1000))
    for label in range(5):
        chosen, p = torch.arange(1000) % 5 == label, float(chances[label])
        assert abs(float(seen[:, chosen].mean()) - p) < 4.5 * math.sqrt(p * (1 - p) / 40_000)
    assert float(seen.mean()) == pytest.approx(0.4, abs=0.005)
    pairs = torch.corrcoef(torch.stack([seen[:-1, 0::5].flatten(), seen[1:, 0::5].flatten()]))
    assert abs(float(pairs[0, 1])) < 4.5 / math.sqrt(199 * 200)


@pytest.mark.parametrize("kind", ["label_correlated", "size_correlated"])
def test_without_strength_or_at_rate_1_it_is_bernoulli(kind):
    clients = population([[i % 3] * (1 + i % 4) for i in range(500)])
    ids = torch.arange(500)
    assert torch.equal(online(build(kind, clients, rate=0.3, strength=0.0), ids), online(Bernoulli(0.3), ids))
    assert online(build(kind, clients, rate=1.0, strength=5.0), ids).all()


def test_clients_that_are_alike_are_online_alike():
    model = build("label_correlated", population([[1, 2]] * 9), rate=0.3, strength=7.0)
    assert model.rate(torch.arange(9)).tolist() == pytest.approx([0.3] * 9)


@dataclass(frozen=True)
class Huge:
    """Client i holds i % 4 + 1 examples of class i % 7; it counts whom it was asked for."""

    size: int
    asked: list[int]

    def summary(self) -> Summary:
        return Summary(1, 4, 2.5)

    def num_examples(self, ids: Tensor) -> Tensor:
        return ids % 4 + 1

    def domains(self, ids: Tensor) -> Tensor:
        return torch.zeros_like(ids)

    def local_data(self, ids: Tensor) -> LocalData:
        self.asked.extend(ids.tolist())
        rows = torch.arange(len(ids))[:, None].expand(-1, 4)
        return LocalData({"x": ids[:, None].float(), "y": ids % 7}, rows, self.num_examples(ids), torch.zeros_like(ids))

    def to(self, device: torch.device) -> Huge:
        return replace(self)


def test_a_huge_population_is_calibrated_on_a_fixed_draw_and_asked_for_its_cohorts_once():
    clients = Huge(10**10, [])
    calibrating = calibration_clients(clients)
    assert len(calibrating.unique()) == len(calibrating) == CALIBRATED_ON
    model = build("label_correlated", clients, rate=0.2, strength=2.0)
    assert clients.asked == calibrating.tolist()
    cohort = rng.sample(rng.key(8), 10**10, 3000)
    clients.asked.clear()
    first = online(model, cohort)
    assert sorted(clients.asked) == sorted(cohort.tolist())
    clients.asked.clear()
    assert torch.equal(online(model, cohort.flip(0)), first.flip(0))
    assert torch.equal(online(model, cohort[:0]), first[:0])
    assert clients.asked == []
    assert float(model.rate(cohort).mean()) == pytest.approx(0.2, abs=0.01)
    assert torch.equal(model.propensity(cohort), 2 * (cohort % 7).double() / 6 - 1)
    by_size = build("size_correlated", clients, rate=0.2)
    assert float(by_size.rate(cohort).mean()) == pytest.approx(0.2, abs=0.01)
    assert clients.asked == []  # sizes need no data


def test_a_cohort_is_looked_at_in_portions_that_fit(monkeypatch):
    whole = by_label(population(MIXED), torch.arange(7))(torch.arange(7))
    monkeypatch.setattr(labels, "ROWS", 8)
    assert torch.equal(by_label(population(MIXED), torch.arange(7))(torch.arange(7)), whole)


def test_the_answer_depends_on_no_company():
    model = build("label_correlated", population(MIXED), rate=0.5)
    fresh = build("label_correlated", population(MIXED), rate=0.5)
    together = online(model, torch.tensor([5, 5, 2, 0]))
    assert together.tolist() == [bool(online(fresh, torch.tensor([i]))) for i in (5, 5, 2, 0)]


def test_what_cannot_be_followed_is_refused(subtests):
    mixed = population(MIXED)
    rows = [
        ((mixed, {"classes": [2, 12]}), "availability.classes=[2, 12]"),
        ((mixed, {"classes": [9, 6]}), "availability.classes=[9, 6]"),  # also between others
        ((population([[0], [0, 0]]), {}), "availability.kind='label_correlated'"),
        (
            (replace(mixed, data={**mixed.data, "y": mixed.data["y"].double()}), {}),
            "availability.kind='label_correlated'",
        ),
    ]
    all_refused(subtests, lambda given: build("label_correlated", given[0], **given[1]), rows)


def test_where_labels_are_at_hand_no_cohort_is_looked_at_for_the_first_time_in_a_run(monkeypatch):
    monkeypatch.setattr(labels, "CALIBRATED_ON", 3)
    clients = population(MIXED)
    model, plain = build("label_correlated", clients), by_label(clients, torch.arange(7))(torch.arange(7))
    looked = []
    for name in ("labels", "local_data"):
        monkeypatch.setattr(InMemoryPopulation, name, lambda self, ids: looked.append(ids))
    assert torch.equal(model.propensity(torch.arange(7)), plain)
    assert looked == []


def test_labels_alone_say_what_labels_beside_examples_do(monkeypatch):
    alone = build("label_correlated", population(MIXED), classes=[9, 1]).propensity(torch.arange(7))
    monkeypatch.delattr(InMemoryPopulation, "labels")
    assert torch.equal(build("label_correlated", population(MIXED), classes=[9, 1]).propensity(torch.arange(7)), alone)
