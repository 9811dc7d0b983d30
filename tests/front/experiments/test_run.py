"""Whole runs on digits: tables, account, stopping, starting again, several runs at once."""

import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
import yaml

import fedfleet
from fedfleet.experiments import sweep
from tests.front.experiments.resuming import Interrupting, Told
from tests.refusals import tells

SMALL = {
    "rounds": 6, "population": {"clients": 30, "partition": "label_sorted"},
    "task": {"name": "auc", "model": "mlp", "hidden": [8]},
    "algorithm": {"name": "cdma_ada", "steps": 2, "batch_size": 5, "alpha": 0.5},
    "cohort": {"size": 8, "wait_for": "siwer"}, "availability": {"kind": "bernoulli", "rate": 0.8},
    "executor": {"kind": "local"}, "evaluation": {"every": 4, "train_examples": 100, "per_client": True},
}  # fmt: skip
COUNTS = [
    "invited", "completed", "late", "failed", "unavailable", "client_steps", "floats_up", "floats_down", "bytes_up",
    "bytes_down",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedfleet.run(SMALL, out=tmp_path_factory.mktemp("run") / "one")


def test_rounds_phases_and_fates_agree(run):
    rounds, phases, outcomes = (run.table(t) for t in ("rounds", "phases", "outcomes"))
    assert rounds["round"].tolist() == list(range(6))
    pd.testing.assert_frame_equal(
        phases.groupby("round")[COUNTS].sum(), rounds.set_index("round")[COUNTS], check_dtype=False
    )
    assert (rounds.invited == rounds.completed + rounds.late + rounds.failed + rounds.unavailable).all()
    counted = outcomes.groupby(["round", "outcome"]).size().unstack(fill_value=0)
    for outcome in ("completed", "late", "unavailable"):
        assert counted[outcome].tolist() == rounds[outcome].tolist()
    assert not outcomes.duplicated(["round", "phase", "attempt", "client"]).any()
    assert set(phases.phase) == {"gradient", "update"}


def test_the_account_follows_the_messages(run):
    d = run.summary["model_floats"]
    assert run.summary["dealt"] is True
    phases = run.table("phases").set_index(["round", "phase"])
    online = phases.invited - phases.unavailable
    for phase, steps in run.summary["local_steps"].items():
        of = phases.xs(phase, level="phase")
        assert (of.completed * steps["least"] <= of.client_steps).all()
        assert (of.completed * steps["most"] >= of.client_steps).all()
        assert steps["least"] <= steps["middle"] <= steps["most"] <= 15
    assert (phases.floats_up == phases.completed * d).all()
    assert (phases.bytes_up == 4 * phases.floats_up).all()
    sent = pd.Series(2, phases.index)
    sent[(0, "gradient")] = 1  # there is no earlier point in the first round
    assert (phases.floats_down == online * d * sent).all()
    assert (phases.bytes_down >= 4 * phases.floats_down).all()


def test_evaluations_are_where_they_were_asked_for(run):
    rounds = run.rounds
    for column in ("eval/auc", "eval/train_auc"):
        assert rounds[column].notna().tolist() == [False, False, False, True, False, True]
    assert rounds.train_loss.notna().all()
    assert run.summary["final"]["eval/auc"] == rounds["eval/auc"].iloc[-1]
    assert 0 <= run.summary["initial"]["eval/auc"] <= 1
    clients = run.table("clients")
    assert clients["round"].unique().tolist() == [3, 5]
    assert (clients.groupby("round").size() == 30).all()
    assert clients.loss.std() > 0


def test_the_folder_holds_what_is_promised(run):
    names = {p.name for p in run.folder.iterdir()}
    assert {"config.yaml", "environment.json", "summary.json", "model.safetensors", "rounds.parquet"} <= names
    resolved = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (resolved["schema_version"], resolved["executor"]["inner"]) == (1, "factored")
    assert (resolved["executor"]["block_size"], resolved["algorithm"]["gradient_chunk"]) == (8, 500)
    assert json.loads((run.folder / "summary.json").read_text())["status"] == "finished"
    card = (run.folder / "model_card.md").read_text()  # with a report or without
    assert "cdma_ada learnt to rank" in card
    assert "It ran to its last round." in card


@pytest.mark.parametrize("read", [lambda path: path, fedfleet.load])
def test_the_resolved_configuration_gives_the_same_bytes(run, tmp_path, read):
    again = fedfleet.run(read(run.folder / "config.yaml"), out=tmp_path / "again")
    assert (again.folder / "model.safetensors").read_bytes() == (run.folder / "model.safetensors").read_bytes()


def test_it_stops_at_a_metric_or_at_a_time(tmp_path):
    reached = fedfleet.run(SMALL, {"until": "eval/auc=0.0001", "evaluation.every": 2}, out=tmp_path / "until")
    assert reached.summary["status"] == "stopped"
    timed = fedfleet.run(SMALL, {"max_seconds": 1e-6}, out=tmp_path / "timed")
    assert (timed.summary["status"], timed.summary["rounds"]) == ("stopped", 1)
    assert timed.summary["final"]


PLAIN = {
    "rounds": 8, "population": {"clients": 20}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 2, "batch_size": 5}, "cohort": {"size": 4},
    "executor": {"kind": "local"}, "faults": {"non_finite": "keep"},
}  # fmt: skip


@pytest.mark.parametrize(("bound", "lr", "line"), [
    ("not_finite", 1e38, r"round \d: the model is not finite"),
    (1.5, 0.1, r"round 0, phase 'train': the training loss is 2\.\d+, above stop_if_diverged=1.5"),
])  # fmt: skip
def test_it_stops_where_training_diverges(tmp_path, bound, lr, line):
    told, given = Told(), {"algorithm.lr": lr, "stop_if_diverged": bound}
    found = fedfleet.run(PLAIN, given, out=tmp_path / "run", callbacks=told).summary
    assert (found["status"], found["error"]) == ("stopped", None)
    assert 1 <= found["rounds"] < 8
    assert re.fullmatch(line, found["diverged"])
    assert any(line.startswith(f"stopped: {found['diverged']}: lower the learning rates") for line in told.lines)
    assert "eval/accuracy" in found["final"]  # the last model is evaluated
    goes_on = fedfleet.resume(tmp_path / "run", {"stop_if_diverged": None}).summary
    assert (goes_on["status"], goes_on["rounds"], goes_on["diverged"]) == ("finished", 8, None)


def test_it_does_not_stop_where_training_does_not_diverge(tmp_path):
    plain, *others = (
        fedfleet.run(PLAIN, {"stop_if_diverged": bound, "rounds": 3}, out=tmp_path / f"{bound}").summary
        for bound in (None, "not_finite", 50.0)
    )
    assert [(s["status"], s["diverged"], s["final"]) for s in others] == [("finished", None, plain["final"])] * 2


def test_a_warm_start_goes_on_from_the_file(run, tmp_path):
    model = str(run.folder / "model.safetensors")
    none = fedfleet.run(SMALL, {"rounds": 0, "warm_start": model}, out=tmp_path / "none")
    assert none.summary["final"] == run.summary["final"]
    tells(lambda: fedfleet.run(SMALL, {"task.hidden": [9], "warm_start": model}, out=tmp_path / "misfit"), "warm_start")


def test_failing_code_leaves_a_summary_and_the_rest(tmp_path):
    class Broken(type(fedfleet.Experiment(fedfleet.load(SMALL)).task)):
        def metrics(self, outputs, data):
            if list((tmp_path / "run").glob("checkpoints/*")):
                raise RuntimeError("no more")
            return super().metrics(outputs, data)

    config = fedfleet.load(
        SMALL, {"evaluation.train_examples": 0, "evaluation.per_client": False, "evaluation.every": 1}
    )
    experiment = fedfleet.Experiment(config)
    experiment.task.__class__ = Broken
    with pytest.raises(fedfleet.FedfleetError, match="RuntimeError: no more"):
        experiment.run(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "no more" in summary["error"]
    assert (tmp_path / "run" / "model.safetensors").exists()


RETRIED = {"availability.rate": 0.6, "cohort.min_responses": 4, "cohort.wait_for": "all"}


def test_too_few_answers_is_an_error_after_bounded_retries(tmp_path):
    with pytest.raises(fedfleet.FedfleetError, match="10 cohorts in a row"):
        fedfleet.run(SMALL, {**RETRIED, "availability.rate": 0.01, "cohort.min_responses": 8}, out=tmp_path / "run")


def test_retries_are_in_the_tables(tmp_path):
    run = fedfleet.run(SMALL, RETRIED, out=tmp_path / "run")
    phases = run.table("phases")
    assert phases.attempt.max() >= 1
    aborted = phases[phases.completed < 4]
    assert len(aborted) > 0
    assert (aborted.floats_down > 0).any()
    assert (aborted.completed > 0).any()
    for (_, each), sent in itertools.product(phases.groupby("phase"), ("floats_up", "bytes_up")):
        (size,) = set((each[sent] / each.completed)[each.completed >= 4])
        assert size > 0
        assert (each[sent] == each.completed * size).all(), "what too few have sent has been sent"
    assert run.table("rounds").bytes_up.sum() == phases.bytes_up.sum()


def test_a_model_that_is_good_enough_is_not_trained(run, tmp_path):
    overrides = {"until": "eval/auc>=0", "warm_start": str(run.folder / "model.safetensors")}
    stopped = fedfleet.run(SMALL, overrides, out=tmp_path / "run")
    assert (stopped.summary["status"], stopped.summary["rounds"]) == ("stopped", 0)
    assert stopped.summary["initial"] == stopped.summary["final"] == run.summary["final"]


def test_tables_without_rows_have_their_columns_and_types(run, tmp_path):
    none = fedfleet.run(SMALL, {"rounds": 0}, out=tmp_path / "none")
    for name in ("rounds", "phases", "outcomes"):
        expected = run.table(name).dtypes.drop("algorithm/alpha", errors="ignore")
        pd.testing.assert_series_equal(none.table(name).dtypes, expected)
    assert len(none.rounds) == 0


def test_metrics_have_their_columns_before_they_are_measured(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fedfleet.run(SMALL, out=tmp_path / "run", callbacks=Interrupting(0))
    rounds = pd.read_parquet(tmp_path / "run" / "rounds.parquet")
    assert (rounds["eval/auc"].isna().tolist(), rounds["eval/auc"].dtype) == ([True], "float64")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("interrupted", 1)


def test_a_summary_is_json_whatever_was_measured(tmp_path):
    class Undefined(type(fedfleet.Experiment(fedfleet.load(SMALL)).task)):
        def metrics(self, outputs, data):
            return {"auc": float("nan"), "loss": float("inf")}

    experiment = fedfleet.Experiment(fedfleet.load(SMALL, {"rounds": 1}))
    experiment.task.__class__ = Undefined
    run = experiment.run(tmp_path / "run")
    text = (run.folder / "summary.json").read_text()
    summary = json.loads(text, parse_constant=pytest.fail)
    assert summary["final"]["eval/auc"] is None
    assert not {"eval/auc", "eval/loss"} & set(summary["best"])


def test_compared_algorithms_keep_their_own_defaults():
    config = fedfleet.load({"executor.kind": "local", "compare": {"avg": {}, "opt": {"algorithm.name": "fedopt"}}})
    avg, opt = (t.config.algorithm for t in sweep.planned(config))
    assert (avg.server_optimizer.name, opt.server_optimizer.name) == ("sgd", "adam")


def test_labels_are_safe_folder_names(tmp_path):
    config = fedfleet.load({"compare": {"..": {}, "a/b c": {}, "é": {}}, "seeds": [1]})
    assert [t.place for t in sweep.planned(config)] == ["run/seed-1", "a-b-c/seed-1", "é/seed-1"]


def test_the_account_of_one_phase(tmp_path):
    overrides = {
        "algorithm.name": "fedavg", "task.name": "classification", "cohort.wait_for": 3, "availability": "always",
    }  # fmt: skip
    overrides |= {"evaluation.per_client": False, "evaluation.train_examples": 0}
    run = fedfleet.run(SMALL, overrides, out=tmp_path / "run")
    d, rounds = run.summary["model_floats"], run.rounds
    assert d == 64 * 8 + 8 + 8 * 10 + 10
    assert (rounds.completed == 3).all()
    assert (rounds.late == 5).all()
    assert (rounds.floats_up == 3 * d).all()
    assert (rounds.floats_down == 8 * d).all()
    assert (rounds.client_steps == 3 * 2).all()
    assert (rounds.virtual_s > 0).all()
    assert run.summary["floats_up"] == rounds.floats_up.sum()
    assert not (run.folder / "clients.parquet").exists()
    outcomes = run.table("outcomes")
    for index, group in outcomes.groupby("round"):
        waited = group.virtual_s[group.outcome == "completed"].max() - rounds.virtual_s[:index].sum()
        assert waited == pytest.approx(rounds.virtual_s[index])
        assert (group.virtual_s[group.outcome == "late"] > group.virtual_s[group.outcome == "completed"].max()).all()


def test_clients_with_less_than_a_batch_learn_from_all_they_have(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    data = fedfleet.data.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.arange(40) // 4)
    config = {"rounds": 2, "cohort": {"size": 3}, "executor": {"kind": "local"}, "task": {"model": "logistic"}}
    small, whole = (
        fedfleet.run(config, given, data=data, out=tmp_path / name)
        for name, given in (("small", {}), ("whole", {"algorithm.batch_size": 4}))
    )
    assert (small.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert (
        fedfleet.resume(small.folder, {"rounds": 3}, data=data).summary["rounds"] == 3
    )  # where the default is on record
    with pytest.raises(fedfleet.ConfigError, match=r"algorithm\.batch_size=11: the largest client has 4 examples"):
        fedfleet.run(config, {"algorithm.batch_size": 11}, data=data, out=tmp_path / "said")
