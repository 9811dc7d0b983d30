"""Clients' own models, on examples of theirs that they have not seen."""

from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedfleet
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.work import BatchPlan
from tests.refusals import all_say

BASE: dict[str, Any] = {
    "rounds": 3,
    "population": {"clients": 12, "held_out": 0.25, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 6}},
    "cohort": {"size": 5}, "task": {"name": "classification", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "steps": 3, "batch_size": 5, "lr": 0.2}, "executor": {"kind": "local"},
    "evaluation": {"every": 3, "per_client": True},
}  # fmt: skip


def right(z: dict[str, Tensor], x: Tensor, y: Tensor) -> float:
    h = torch.relu(x.flatten(1) @ z["1.weight"].T + z["1.bias"])
    return float(((h @ z["3.weight"].T + z["3.bias"]).argmax(1) == y).double().mean())


def tuned(z: dict[str, Tensor], x: Tensor, y: Tensor, lr: float) -> dict[str, Tensor]:
    at = {n: p.clone().requires_grad_() for n, p in z.items()}
    h = torch.relu(x.flatten(1) @ at["1.weight"].T + at["1.bias"])
    loss = torch.nn.functional.cross_entropy(h @ at["3.weight"].T + at["3.bias"], y)
    return {n: p - lr * g for (n, p), g in zip(z.items(), torch.autograd.grad(loss, [*at.values()]), strict=True)}


@pytest.mark.parametrize("inner", ["serial", "batched", "factored"])
def test_both_models_are_measured_on_what_is_held_out(tmp_path, inner):
    x = Experiment(fedfleet.load(BASE, {"executor.inner": inner}))
    run = x.run(tmp_path / "run")
    z = model(run)
    each = run.table("clients")
    local = x.population.local_data(torch.arange(12))
    for c in range(12):
        held = local.held.rows[c, : local.held.counts[c]]
        examples, labels = local.data["x"][held], local.data["y"][held]
        mine = each[(each["client"] == c) & (each["round"] == 2)].iloc[0]
        assert mine["accuracy"] == pytest.approx(right(z, examples, labels), abs=1e-6)
        key = rng.fold(rng.fold(rng.key(0), "own model"), torch.tensor([c]), torch.tensor([0]))
        plan = BatchPlan(size=5, steps=3, stratified="proportional")
        walk = schedule(plan, local.rows[c : c + 1], local.counts[c : c + 1], rng.fold(key, "stage", 0))
        p = z
        for rows, weight in zip(walk.rows[0], walk.weight[0], strict=True):
            p = tuned(p, local.data["x"][rows[weight > 0]], local.data["y"][rows[weight > 0]], 0.2)
        assert mine["own_accuracy"] == pytest.approx(right(p, examples, labels), abs=1e-6)
    told, of = run.summary["final"], each[each["round"] == 2]
    weights = local.held.counts.double().numpy()
    for name, column in (("clients", "accuracy"), ("own", "own_accuracy")):
        values = of[column].to_numpy()
        assert told[f"eval/{name}_accuracy"] == pytest.approx((values * weights).sum() / weights.sum(), abs=1e-6)
        assert told[f"eval/{name}_accuracy_std"] == pytest.approx(values.std(), abs=1e-6)
        assert told[f"eval/{name}_accuracy_worst_tenth"] == pytest.approx(values.min(), abs=1e-6)
    assert told["eval/own_loss_worst_tenth"] == pytest.approx(of["own_loss"].max(), abs=1e-6)


def model(run: fedfleet.Run) -> dict[str, Tensor]:
    return {n.removeprefix("x."): v for n, v in load_file(run.folder / "model.safetensors").items()}


def test_nobody_learns_from_what_is_held_out():
    x = Experiment(fedfleet.load(BASE))
    local = x.population.local_data(torch.arange(12))
    for c in range(12):
        seen, held = set(local.rows[c].tolist()), set(local.held.rows[c].tolist())
        assert not seen & held
        assert x.problem.num_examples is not None
        assert int(x.problem.num_examples(torch.tensor(c))) == len(seen)


def test_a_state_is_looked_up_and_not_changed_and_until_may_ask_for_it(tmp_path):
    given = {"algorithm.name": "fedper", "checkpoint.best": "eval/own_accuracy"}
    often = fedfleet.run(BASE, {**given, "evaluation.every": 1}, out=tmp_path / "often")
    seldom = fedfleet.run(BASE, given, out=tmp_path / "seldom")
    last = [
        run.table("clients").query("round == 2").drop(columns="round").reset_index(drop=True) for run in (often, seldom)
    ]
    pd.testing.assert_frame_equal(*last)
    assert (often.folder / "best.safetensors").exists()
    assert often.summary["final"]["eval/own_accuracy"] > often.summary["final"]["eval/clients_accuracy"]
    stopped = fedfleet.run(
        BASE, {**given, "evaluation.every": 1, "until": "eval/own_accuracy=0.01"}, out=tmp_path / "s"
    )
    assert stopped.summary["status"] == "stopped"


def test_a_resumed_run_measures_the_same(tmp_path):
    given = {"algorithm.name": "fedrod", "evaluation.every": 1}
    whole = fedfleet.run(BASE, {**given, "rounds": 4}, out=tmp_path / "whole")
    fedfleet.run(BASE, {**given, "rounds": 2}, out=tmp_path / "part")
    resumed = fedfleet.resume(tmp_path / "part", {"rounds": 4})
    pd.testing.assert_frame_equal(whole.table("clients"), resumed.table("clients"))
    assert whole.summary["final"] == resumed.summary["final"]


def test_what_cannot_be_is_refused(subtests):
    rows = [
        ({"evaluation.per_client": False},
         "population.held_out=0.25: nothing is measured on that share of each client's examples: set evaluation.per_client=true"),
        ({"population.partition": {"kind": "iid"}, "population.clients": 1442},
         "population.held_out=0.25: there are clients with 1 example, of two or more one is held out"),
        ({"population.dataset": {"name": "digits", "label_domains": True},
         "population.partition": {"kind": "by_domain"}, "domains.target": [9], "task": {"name": "two_heads"},
         "algorithm": {"name": "fact"}, "evaluation.per_client": False},
         "population.held_out=0.25: nothing is measured"),
        ({"population.dataset": {"name": "digits", "label_domains": True},
         "population.partition": {"kind": "by_domain"}, "domains.target": [9], "task": {"name": "two_heads"},
         "algorithm": {"name": "fact"}}, "population.held_out=0.25"),
    ]  # fmt: skip
    all_say(subtests, lambda overrides: Experiment(fedfleet.load(BASE, {"cohort.size": 2, **overrides})), rows)
