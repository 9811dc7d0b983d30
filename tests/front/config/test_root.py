"""Examples that are the server's own: whose they are, what they cost, what is refused."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import fedfleet
from fedfleet.commands.plan import describe
from fedfleet.config.schema import load
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.experiments.prepared import Prepared
from fedfleet.simulator.errors import ConfigError

ALGORITHM = {"name": "robust", "of": {"name": "fedavg", "steps": 2}, "rule": "fltrust"}
BASE: dict[str, Any] = {
    "rounds": 3,
    "population": {"clients": 20, "root": {"examples": 100}},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": ALGORITHM,
    "cohort": {"invite": 8, "respond": "siwer"},
    "devices": "lognormal",
    "executor": {"kind": "local", "block_size": 3},
    "evaluation": {"every": 1, "per_client": True},
}
LABELS = torch.arange(600) % 10
NUMBERED = Dataset(
    "numbered",
    Examples(torch.arange(600.0)[:, None], LABELS, 10),
    Examples(torch.arange(600.0, 620)[:, None], LABELS[:20], 10),
)


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


@pytest.mark.parametrize(("bias", "label", "ones"), [(0.6, 3, 30), (0.0, 3, 0), (1.0, 0, 50), (0.21, 9, 10)])
def test_so_many_are_of_a_label(bias, label, ones):
    mine, _ = of({"population.root": {"examples": 50, "bias": bias, "label": label}})
    labels = mine.long() % 10
    assert int((labels == label).sum()) == ones
    assert len(mine.unique()) == 50
    assert ones == 50 or len(labels.unique()) > 7


def test_what_the_server_works_at_costs_nothing_and_is_nobodys_in_the_tables(tmp_path):
    own = fedfleet.run(BASE, out=tmp_path / "own")
    plain = fedfleet.run(BASE, {"population.root": None, "algorithm.rule": "median"}, out=tmp_path / "plain")
    for name in ("heard", "floats_up", "bytes_up", "floats_down", "bytes_down", "client_steps", "virtual_s"):
        assert own.rounds[name].tolist() == plain.rounds[name].tolist(), name
    assert pd.read_parquet(own.folder / "phases.parquet")["phase"].tolist() == ["train"] * 3
    assert sorted(pd.read_parquet(own.folder / "clients.parquet")["client"].unique()) == list(range(20))
    assert own.rounds["algorithm/trusted"].between(0.5, 1).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"population.root": None}, "population.root=null: the server of robust learns from examples of its own: set"),
        ({"algorithm.rule": "median"}, "population.root.examples=100: the server of robust learns from none: leave"),
        ({"algorithm": "fedavg"}, "population.root.examples=100: the server of fedavg learns from none: leave"),
        ({"population.root.examples": 1442}, "examples=1442: that is all there are, and clients would have none"),
        ({"population.root.examples": 2000}, "examples=2000: 2000 of them are to be training examples, and there are 1442"),
        ({"population.root": {"examples": 900, "label": 1, "bias": 0.5}}, "examples=900: 450 of them are to be of label 1"),
        ({"population.root": {"label": 10, "bias": 0.5}}, "population.root.label=10: there are 10 labels, from 0"),
        ({"population.root": {"label": 1}}, "bias is towards a label: give label and bias, or neither"),
        ({"population.root": {"bias": 0.1}}, "bias is towards a label: give label and bias, or neither"),
        ({"population.root.examples": 0}, "population.root.examples=0: input should be greater than or equal to 1"),
        ({"population.dataset": "synthetic"}, "population.root.examples=100: 'synthetic' comes in clients"),
        (
            {
                "population.dataset": {"name": "digits", "label_domains": True},
                "population.partition": "by_domain",
                "domains.target": [9],
                "evaluation.per_client": False,
            },
            "population.root.examples=100: of domains.target the server would have no labels",
        ),
        ({"algorithm.of": {"name": "vrex", "steps": 2}, "domains.kind": "label"}, "algorithm.of='vrex': each of its clients is"),
        ({"algorithm.of": {"name": "fedga", "rounds": 3}, "population.held_out": 0.2}, "algorithm.of='fedga': its clients hold"),
        ({"algorithm.of": "fedbuff"}, "algorithm.of='fedbuff': the server does not take a mean"),
        ({"algorithm.bucket": 2}, "bucket=2 is not for rule=fltrust"),
        ({"secure_aggregation": {}}, "keeps what each client sends of slot 'z'"),
        (
            {"privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}, "algorithm.of.weight": "uniform"},
            "privacy: robust does not say that the mean of clients' models is the next one",
        ),
        ({"cohort.late": "keep"}, "of use in its own round alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(changes, says):
    with pytest.raises(ConfigError) as caught:
        fedfleet.Experiment(load(BASE, changes))
    assert says in str(caught.value)
    assert str(caught.value).isprintable()


def test_private_examples_are_clients_and_the_server_learns_from_its_own_without_noise(tmp_path):
    hidden = {
        "example_privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0},
        "evaluation.per_client": False,
    }
    x = fedfleet.Experiment(load(BASE, hidden))
    assert [p.work.stages[0].batches.drawn for p in (*x.algorithm.phases, *x.algorithm.server)] == [True, False]
    assert dict(describe(x))["examples of the server's own"] == "100"
    rounds = x.run(tmp_path / "run").rounds
    assert (rounds["eval/example_epsilon_spent"] > 0).all()
