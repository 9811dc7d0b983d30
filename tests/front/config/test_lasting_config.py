"""Clients' optimisers that last from round to round, with what they do not go with."""

from typing import Any

import pytest
import torch

from fedfleet.config.schema import load
from fedfleet.experiments.experiment import Experiment
from tests.refusals import all_refused

PERSIST = {"momentum": 0.9, "state": "persist"}
BASE: dict[str, Any] = {
    "rounds": 2, "population": {"dataset": "digits", "clients": 30, "partition": {"kind": "label_sorted"}},
    "task": {"name": "classification", "model": "mlp", "hidden": [8]}, "executor": {"kind": "local"},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5, "client_optimizer": PERSIST}, "cohort": {"size": 8},
}  # fmt: skip
KEY = "algorithm.client_optimizer.state='persist'"
MEDIAN = {"name": "robust", "rule": "median", "of": {"name": "fedavg", "client_optimizer": PERSIST}}
REFUSED = [
    ({"algorithm.name": "fedbuff", "cohort": {}}, KEY),
    ({"algorithm.name": "clustered_sampling"}, KEY),
    ({"cohort.late": "keep"}, KEY),
    ({"algorithm": MEDIAN, "cohort.late": "keep"}, "algorithm.of.client_optimizer.state='persist'"),
    ({"algorithm.client_optimizer.momentum": 0.0}, "algorithm.client_optimizer="),
    ({"algorithm": {"name": "afl", "optimizer": {"name": "adam", "state": "persist"}}}, "algorithm.optimizer.state"),
]


def test_what_they_do_not_go_with_is_refused(subtests):
    all_refused(subtests, lambda changes: Experiment(load(BASE, changes)), REFUSED)


FEEDBACK = {"name": "top_k", "share": 0.2, "error_feedback": True}
AROUND: list[dict[str, Any]] = [
    {"transforms.up": [FEEDBACK], "attack": {"kind": "sign_flip", "share": 0.2}},
    {"algorithm": MEDIAN, "rounds": 3},
    {"algorithm.correction": "fedvarp", "population.held_out": 0.2, "evaluation.per_client": True},
]


@pytest.mark.parametrize("around", AROUND)
def test_a_run_keeps_them_with_what_else_is_around_the_algorithm(around, tmp_path):
    """Also with clients' own models, which go on from them."""
    at = "algorithm.of.client_optimizer" if "algorithm" in around else "algorithm.client_optimizer"
    given = {**around, "cohort.size": 30}
    runs = [
        Experiment(load(BASE, {**given, **change})).run(tmp_path / name)
        for name, change in (("persist", {}), ("reset", {f"{at}.state": "reset"}))
    ]
    losses = [run.rounds["train_loss"].tolist() for run in runs]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    models = [torch.cat([p.flatten() for p in run.model().state_dict().values()]) for run in runs]
    assert float((models[0] - models[1]).abs().max()) > 1e-3
