"""Examples that are the server's own: whose they are, what they cost, what is refused."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import fedfleet
from fedfleet.assembly.prepared import Prepared
from fedfleet.commands.plan import describe
from fedfleet.config.schema import load
from fedfleet.datasets.examples import Dataset, Examples
from tests.refusals import all_refused

ALGORITHM = {"name": "robust", "of": {"name": "fedavg", "steps": 2}, "rule": "fltrust"}
BASE: dict[str, Any] = {
    "rounds": 3, "population": {"clients": 20, "root": {"examples": 100}},
    "task": {"name": "classification", "model": "logistic"}, "algorithm": ALGORITHM,
    "cohort": {"size": 8, "wait_for": "siwer"}, "devices": "lognormal",
    "executor": {"kind": "local", "block_size": 3}, "evaluation": {"every": 1, "per_client": True},
}  # fmt: skip
LABELS = torch.arange(600) % 10
TRAIN = Examples(torch.arange(600.0)[:, None], LABELS, 10)
NUMBERED = Dataset("numbered", TRAIN, Examples(torch.arange(600.0, 620)[:, None], LABELS[:20], 10))


def of(changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The numbers of the server's examples, and of all clients'."""
    found = Prepared(load(BASE, changes), data=NUMBERED)
    assert found.root is not None
    setup, every = found.setup(), torch.arange(20)
    assert setup.root is found.root
    assert found.root.num_examples(torch.tensor([0])).tolist() == [len(found.root.indices)]
    local = setup.population.local_data(every)
    theirs = [local.data["x"][rows[:n], 0] for rows, n in zip(local.rows, local.counts.tolist(), strict=True)]
    return found.root.local_data(torch.tensor([0])).data["x"][:, 0], torch.cat(theirs)


@pytest.mark.parametrize(
    "changes", [{}, {"evaluation.validation": 0.1}, {"attack": {"kind": "label_flip", "share": 0.3}}]
)
def test_root_examples_are_nobody_elses(changes):
    mine, theirs = of(changes)
    every = torch.cat([mine, theirs])
    assert len(mine) == 100
    assert len(every) == len(every.unique()) == (540 if "evaluation.validation" in changes else 600)


def test_they_are_drawn_by_the_seed_of_the_partition():
    mine, theirs = of({})
    again, others = of({"seed": 5})
    assert torch.equal(mine, again)
    assert torch.equal(theirs, others)
    assert len(torch.cat([mine, of({"population.partition_seed": 1})[0]]).unique()) > 150
    assert abs(float(mine.mean()) - 300) < 60
    assert not torch.equal(mine, torch.arange(100.0))


def test_so_many_are_of_a_label():
    for bias, label, ones in ((0.6, 3, 30), (0.0, 3, 0), (1.0, 0, 50), (0.21, 9, 10)):
        mine, _ = of({"population.root": {"examples": 50, "bias": bias, "label": label}})
        labels = mine.long() % 10
        assert (int((labels == label).sum()), len(mine.unique())) == (ones, 50)
        assert ones == 50 or len(labels.unique()) > 7


def test_what_the_server_works_at_costs_nothing_and_is_nobodys_in_the_tables(tmp_path):
    own = fedfleet.run(BASE, out=tmp_path / "own")
    plain = fedfleet.run(BASE, {"population.root": None, "algorithm.rule": "median"}, out=tmp_path / "plain")
    for name in ("completed", "floats_up", "bytes_up", "floats_down", "bytes_down", "client_steps", "virtual_s"):
        assert own.rounds[name].tolist() == plain.rounds[name].tolist(), name
    assert pd.read_parquet(own.folder / "phases.parquet")["phase"].tolist() == ["train"] * 3
    assert sorted(pd.read_parquet(own.folder / "clients.parquet")["client"].unique()) == list(range(20))
    assert own.rounds["algorithm/trusted"].between(0.5, 1).all()


TARGET = {
    "dataset": {"name": "digits", "label_domains": True}, "partition": "by_domain", "root": {"examples": 100},
    "clients": 20,
}  # fmt: skip
HIDDEN = {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}
REFUSED = [
    ({"population.root": None}, "population.root=null"),
    ({"algorithm.rule": "median"}, "population.root.examples=100"),
    ({"algorithm": "fedavg"}, "population.root.examples=100"),
    ({"population.root.examples": 1442}, "population.root.examples=1442"),
    ({"population.root.examples": 2000}, "population.root.examples=2000"),
    ({"population.root": {"examples": 900, "label": 1, "bias": 0.5}}, "population.root.examples=900"),
    ({"population.root": {"label": 10, "bias": 0.5}}, "population.root.label=10"),
    ({"population.root": {"label": 1}}, "population.root"),
    ({"population.root": {"bias": 0.1}}, "population.root"),
    ({"population.root.examples": 0}, "population.root.examples=0"),
    ({"population.dataset": "synthetic"}, "population.root.examples=100"),
    ({"population": TARGET, "domains.target": [9], "evaluation.per_client": False}, "population.root.examples=100"),
    ({"algorithm.of": {"name": "vrex", "steps": 2}, "domains.kind": "label"}, "algorithm.of='vrex'"),
    ({"algorithm.of": {"name": "fedga", "rounds": 3}, "population.held_out": 0.2}, "algorithm.of='fedga'"),
    ({"algorithm.of": "fedbuff"}, "algorithm.of='fedbuff'"),
    ({"algorithm.bucket": 2}, "algorithm: bucket=2"),
    ({"secure_aggregation": {}}, "secure_aggregation: robust keeps what each client sends"),
    ({"privacy": HIDDEN, "algorithm.of.weight": "uniform"}, "privacy: robust does not say that the mean"),
    ({"cohort.late": "keep"}, "cohort.late='keep'"),
]  # fmt: skip


def test_what_cannot_be_is_refused(subtests):
    all_refused(subtests, lambda changes: fedfleet.Experiment(load(BASE, changes)), REFUSED)


def test_private_examples_are_clients_and_the_server_learns_from_its_own_without_noise(tmp_path):
    x = fedfleet.Experiment(load(BASE, {"example_privacy": HIDDEN, "evaluation.per_client": False}))
    assert [p.work.loops[0].batches.drawn for p in (*x.algorithm.phases, *x.algorithm.server)] == [True, False]
    assert dict(describe(x))["examples of the server's own"] == "100"
    rounds = x.run(tmp_path / "run").rounds
    assert (rounds["eval/example_epsilon_spent"] > 0).all()
