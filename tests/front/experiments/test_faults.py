"""``faults`` in a configuration: what a run folder says of clients at fault, for any number of workers."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import fedfleet
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config import schema as config
from fedfleet.config.population import load_data
from fedfleet.experiments import campaign
from fedfleet.experiments.experiment import Experiment, Run
from fedfleet.experiments.progress import Progress
from fedfleet.report import write_report
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.tasks import from_module
from tests.parts import slow_but
from tests.refusals import all_say

DROP = {"on_client_error": "drop_client", "non_finite": "drop_client"}
BASE: dict[str, Any] = {
    "rounds": 4, "population": {"clients": 12}, "task": {"name": "classification", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "scaffold", "epochs": 1}, "cohort": {"size": 6},
    "executor": {"kind": "local", "block_size": 2, "inner": "factored"}, "evaluation": {"every": 2},
}  # fmt: skip
RAISED = "RuntimeError: index 99 is out of bounds for dimension 1 with size 10"
"""What torch says of a label that does not exist."""
TABLES = ("rounds", "phases", "outcomes")


def run(out: Path, given: dict[str, Any], fault: str | None, bad: tuple[int, ...] = (2, 3, 7)) -> Run:
    """Run with clients whose pixels are NaN, or whose labels do not exist."""
    chosen = config.load(BASE, given)
    population: Any = Experiment(chosen).population
    mine = torch.cat([population.indices[population.offsets[c] : population.offsets[c + 1]] for c in bad])
    x, y = population.data["x"].clone(), population.data["y"].clone()
    if fault == "label":
        y[mine] = 99
    elif fault == "nan":
        x[mine] = torch.nan
    return Experiment(chosen, population=replace(population, data={"x": x, "y": y}), data=load_data(chosen)).run(out)


def events(done: Run) -> list[dict[str, Any]]:
    log = done.folder / "events.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("fault", [None, "nan", "label"])
def test_events_say_who_was_dropped_and_whether_the_run_can_be_repeated_to_the_bit(tmp_path, fault):
    done = run(tmp_path / "run", {"faults": DROP}, fault)
    lines, outcomes = events(done), done.table("outcomes")
    dropped = outcomes[outcomes.outcome == "failed"]
    assert (len(lines) > 0) == (fault is not None)
    columns = ["round", "phase", "attempt", "client"]
    found = pd.DataFrame(lines, columns=columns).sort_values(columns).to_numpy().tolist()
    assert found == dropped[columns].sort_values(columns).to_numpy().tolist()
    assert {e["client"] for e in lines} <= {2, 3, 7}
    assert all(e["event"] == "client_dropped" for e in lines)
    for e in lines:
        if fault == "label":
            assert (e["why"], e["traceback"].splitlines()[-1]) == (f"stage 0, step 0: {RAISED}", RAISED)
        else:
            assert e["why"] == "it sends a value that is not finite in 'dz', first seen after stage 0, step 0"
            assert "traceback" not in e
    assert done.summary["bit_exact"] is (fault != "label")
    assert done.rounds.failed.tolist() == [sum(e["round"] == t for e in lines) for t in range(4)]
    assert (done.rounds.completed + done.rounds.failed == 6).all()
    assert done.rounds.train_loss.notna().all()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("fault", "algorithm"), slow_but([("nan", "fedbuff"), ("label", "scaffold")], ("label", "scaffold"))
)
def test_two_actors_give_the_bytes_of_this_process(tmp_path, fault, algorithm):
    given: dict[str, Any] = {"faults": DROP}
    if algorithm == "fedbuff":
        given |= {"algorithm": {"name": "fedbuff", "epochs": 1, "buffer": 4, "concurrency": 6}, "cohort.size": 10}
    here = run(tmp_path / "local", given, fault)
    there = run(
        tmp_path / "ray", {**given, "executor.kind": "ray", "executor.actors": 2, "executor.cpus_per_actor": 0.5}, fault
    )
    model = "model.safetensors"
    assert (here.folder / model).read_bytes() == (there.folder / model).read_bytes()
    for name in TABLES:
        a, b = (done.table(name).drop(columns="seconds", errors="ignore") for done in (here, there))
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert events(here) == events(there) != []


@pytest.mark.ray
@pytest.mark.slow
def test_a_client_that_hangs_is_dropped(tmp_path):
    given = {
        "rounds": 1, "population.clients": 4, "cohort.size": 4,
        "executor": {"kind": "ray", "actors": 2, "cpus_per_actor": 0.5, "inner": "serial"},
        "faults": {**DROP, "client_timeout_s": 6},
    }  # fmt: skip
    x = Experiment(config.load(BASE, given))
    honest = x.task.objectives["train"]

    def loss(z, batch, ctx, key):
        while int(batch.y.max()) == 99:
            time.sleep(0.1)
        return honest.loss(z, batch, ctx, key)

    population: Any = x.population
    y = population.data["y"].clone()
    y[population.indices[population.offsets[2] : population.offsets[3]]] = 99
    x.task.objectives["train"] = replace(honest, loss=loss)
    algorithm = ALGORITHMS["scaffold"].build(x.config.algorithm, x.task, x.config.cohort)
    data = {**population.data, "y": y}
    mine = {"task": x.task, "algorithm": algorithm, "population": replace(population, data=data)}
    chosen = config.load(BASE, {**given, "task": None, "algorithm": None})
    done = Experiment(chosen, **mine, data=load_data(x.config)).run(tmp_path / "run")
    (dropped,) = [e for e in events(done) if e["event"] == "client_dropped"]
    assert (dropped["client"], dropped["why"]) == (2, "not done after 6 s")
    assert done.summary["bit_exact"] is False
    outcomes = done.table("outcomes")
    assert (outcomes.client[outcomes.outcome == "failed"].tolist(), done.rounds.completed.tolist()) == ([2], [3])


@pytest.mark.parametrize("task", slow_but(["classification", "auc"], "auc"))
def test_what_is_kept_upsets_nothing(tmp_path, task):
    given = {
        "faults": {"non_finite": "keep"}, "evaluation": {"per_client": True, "train_examples": 50}, "selection": "oort",
        "task": {"name": task},
        "algorithm": {"name": "fedavg" if task == "classification" else "cdma_ada", "epochs": 1},
    }  # fmt: skip
    done = run(tmp_path / "run", given, "nan", bad=tuple(range(12)))
    assert done.summary["status"] == "finished"
    assert done.summary["bit_exact"] is True
    assert events(done) == []
    assert (done.rounds.completed == (6 if task == "classification" else 12)).all()
    clients = done.table("clients")
    assert len(clients) == 2 * 12
    assert clients.filter(like="loss").isna().all(axis=None)
    json.loads((done.folder / "summary.json").read_text())
    write_report([done.folder], tmp_path / "report.html")


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), ValueError("two\nlines")], ids=repr)
def test_a_metric_that_raises_ends_the_run_in_a_line(tmp_path, error):
    def metric(outputs, y):
        raise error

    task = from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), metrics=[metric])
    with pytest.raises(ClientError) as e:
        fedfleet.run({"rounds": 1, "population.clients": 4, "cohort.size": 2}, task=task, out=tmp_path / "run")
    assert str(e.value).startswith("the task's metrics: ")
    assert "\n" not in str(e.value)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_fail_is_the_default_and_names_the_client(tmp_path):
    with pytest.raises(ClientError) as e:
        run(tmp_path / "run", {}, "label")
    first, *_, last = str(e.value).splitlines()
    assert first.startswith("round 0: client ")
    assert first.endswith(f", phase 'train', stage 0, step 0: {RAISED}")
    assert last == RAISED
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", str(e.value))


def test_one_of_several_runs_that_fails_is_told_without_its_traceback(tmp_path, monkeypatch):
    class Process:
        returncode = 1

        def communicate(self):
            return "failed: round 0: client 7: no luck\nTraceback (most recent call last):\nRuntimeError: no luck\n", ""

    monkeypatch.setattr(campaign, "child", lambda *command: nullcontext(Process()))
    with pytest.raises(FedfleetError) as e:
        campaign.run(config.load({**BASE, "seeds": [0, 1]}), tmp_path / "out", Progress.silent(), 2, report=False)
    assert str(e.value) == "2 of 2 runs: seed-0: round 0: client 7: no luck"


def test_mistakes_are_told(subtests):
    rows = [
        ({"on_client_error": "drop"}, "faults.on_client_error='drop': input should be 'fail' or 'drop_client'"),
        ({"on_client_error": "keep"}, "faults.on_client_error='keep': input should be 'fail' or 'drop_client'"),
        ({"non_finite": "ignore"}, "faults.non_finite='ignore': input should be 'fail', 'drop_client' or 'keep'"),
        ({"client_timeout_s": 0}, "faults.client_timeout_s=0: input should be greater than 0"),
        ({"nonfinite": "keep"}, "faults.nonfinite='keep': unknown key; did you mean faults.non_finite?"),
    ]  # fmt: skip
    all_say(subtests, lambda given: config.load({"faults": given}), rows)
