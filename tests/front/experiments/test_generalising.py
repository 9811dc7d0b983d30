"""Measures where no client has one domain: the gap, the worst source, and the three ways to select models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import fedfleet
from fedfleet.assembly.weights import load_model
from fedfleet.commands import paper
from fedfleet.commands import study as studying
from fedfleet.experiments.progress import Progress
from fedfleet.files.summary import summary_of
from fedfleet.simulator.author import Batch
from fedfleet.simulator.driver.evaluation import by_roles_of_domains
from tests.front.experiments.resuming import THREE
from tests.refusals import tells

BASE: dict[str, Any] = {
    "rounds": 6,
    "population": THREE,
    "domains": {"target": 4}, "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "lr": 0.05}, "cohort": {"size": 6}, "executor": {"kind": "local"},
    "evaluation": {"every": 1, "validation": 0.25}, "checkpoint": {"best": "eval/validation_source_loss"},
}  # fmt: skip
RECT: dict[str, Any] = {
    **{k: BASE[k] for k in ("executor", "algorithm")}, "rounds": 3,
    "population": {"dataset": "rect4", "clients": 4, "partition": "by_domain"},
    "task": {"name": "classification", "model": "logistic"}, "cohort": {"size": 3}, "domains": {"target": "user4"},
    "evaluation": {"every": 1, "validation": 0.2},
}  # fmt: skip


@pytest.fixture(scope="module")
def rect(tmp_path_factory) -> fedfleet.Run:
    return fedfleet.run(RECT, out=tmp_path_factory.mktemp("rect") / "run")


def test_the_gap_is_the_mean_of_sources_less_the_target(rect):
    final, last = rect.summary["final"], rect.table("domains").query("round == 2")
    accuracy, loss = last["accuracy"].to_numpy(), last["loss"].to_numpy()
    assert final["eval/gap_accuracy"] == pytest.approx(accuracy[:3].mean() - accuracy[3])
    assert final["eval/gap_loss"] == pytest.approx(loss[3] - loss[:3].mean())
    assert final["eval/source_accuracy_worst_domain"] == accuracy[:3].min()
    assert final["eval/source_loss_worst_domain"] == loss[:3].max()
    assert "eval/target_accuracy_worst_domain" not in final
    assert "eval/validation_gap_accuracy" not in final


def test_domains_of_other_sizes_count_alike_and_several_targets_together():
    domains = {"examples": torch.tensor([10, 0, 1, 5, 5]), "accuracy": torch.tensor([0.9, torch.nan, 0.5, 0.4, 0.2])}
    found = by_roles_of_domains(domains, torch.tensor([3, 4]), gap=True)
    assert found == {"source_accuracy_worst_domain": pytest.approx(0.5), "gap_accuracy": pytest.approx(0.4)}
    assert by_roles_of_domains(domains, torch.tensor([0, 3, 4]), gap=False) == {}


def test_validation_knows_the_worst_source_too(rect):
    x = fedfleet.Experiment(fedfleet.load(RECT))
    assert list(rect.summary["final"]) == x.metric_names()
    z, held = load_model(rect.folder / "model.safetensors", x.z), x.evaluation["validation"]
    logits = x.task.functions["predict"](z, Batch(held, torch.ones(len(held["y"]))))
    right = (logits.argmax(1) == held["y"]).double()
    each = [float(right[held["domain"] == d].mean()) for d in range(4)]
    assert rect.summary["final"]["eval/validation_accuracy_worst_domain"] == pytest.approx(min(each))
    assert rect.summary["final"]["eval/validation_source_accuracy_worst_domain"] == pytest.approx(min(each[:3]))


def test_a_run_may_stop_and_select_by_the_gap_of_which_less_is_better(tmp_path):
    given = {"until": "eval/gap_loss=1000", "checkpoint.best": "eval/gap_loss"}
    done = fedfleet.run(RECT, given, out=tmp_path / "run")
    assert (done.summary["status"], len(done.rounds)) == ("stopped", 0)
    done = fedfleet.run(RECT, {**given, "until": None}, out=tmp_path / "all")
    gaps = [done.summary["initial"]["eval/gap_loss"], *done.rounds["eval/gap_loss"]]
    assert done.summary["selected"]["eval/gap_loss"] == min(gaps)


@pytest.mark.parametrize(
    ("metric", "chosen"), [("eval/validation_source_loss", 6), ("eval/validation_target_accuracy", 0)]
)
def test_what_is_selected_is_the_whole_evaluation_of_that_model(tmp_path, metric, chosen):
    """Training-domain validation, and the oracle: what the chosen model is worth on the target, of which nothing is learnt."""
    done = fedfleet.run(BASE, {"checkpoint.best": metric}, out=tmp_path / "run")
    rows = pd.concat([pd.DataFrame([done.summary["initial"]]), done.rounds.filter(like="eval/")], ignore_index=True)
    at = int(rows[metric].idxmin() if metric.endswith("loss") else rows[metric].idxmax())
    assert at == chosen
    want = rows.iloc[at]
    assert done.summary["selected"] == {k: pytest.approx(want[k]) for k in done.summary["final"]}
    x = fedfleet.Experiment(fedfleet.load(BASE))
    best = load_model(done.folder / "best.safetensors", x.z)
    test = x.evaluation["test"]
    logits = x.task.functions["predict"](best, Batch(test, torch.ones(len(test["y"]))))
    right = (logits.argmax(1) == test["y"])[test["target"]].double().mean()
    assert done.summary["selected"]["eval/target_accuracy"] == pytest.approx(float(right))


TABLE = {
    "title": "Digits", "source": "S", "config": "c.yaml", "columns": {"target": "target_loss", "gap": "gap_loss"},
    "value": "selected",
}  # fmt: skip


def written(tmp_path: Path, **changes: Any) -> Path:
    given = {**BASE, "rounds": 4, "compare": {"low": {}, "high": {"algorithm.lr": 2.0}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**given, **changes}))
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(TABLE))
    return tmp_path / "t.yaml"


def test_a_table_of_the_models_that_are_selected(tmp_path):
    paper.run(written(tmp_path), None, 1, tmp_path / "out", Progress.silent(), jobs=1)
    found = json.loads((tmp_path / "out" / "table.json").read_text())
    for row in ("low", "high"):
        (folder,) = [p.parent for p in (tmp_path / "out" / "trials" / row).rglob("summary.json")]
        selected = summary_of(folder)["selected"]
        assert found[row]["target"] == [pytest.approx(selected["eval/target_loss"])]
        assert found[row]["gap"] == [pytest.approx(selected["eval/gap_loss"])]


def test_a_table_of_selected_models_asks_by_what_and_has_no_metric_of_one_domain(tmp_path):
    call = lambda: paper.run(tmp_path / "t.yaml", None, 1, tmp_path / "out", Progress.silent(), jobs=1)  # noqa: E731
    for best in (None, "auto"):
        written(tmp_path, checkpoint={"best": best})
        tells(call, "value='selected': c.yaml does not say by what … checkpoint.best")
    written(tmp_path).write_text(yaml.safe_dump({**TABLE, "columns": {"first": "accuracy[0]"}}))
    tells(call, "'accuracy[0]' is known of the last model alone")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_leave_one_domain_out_validation_is_a_study_of_the_sources(tmp_path):
    """With domain 4 put by, each source is left out in turn for each rate; the mean says which is best."""
    sources = {**BASE, "rounds": 2, "population": {**BASE["population"], "clients": 6}, "domains": {}}
    config = fedfleet.load(sources, {"population.dataset.classes": [1, 8], "cohort.size": 3})
    planned = studying.plan(config, ["algorithm.lr=0.001,0.5", "domains.target=each"], seeds=2)
    assert planned.varied == {"algorithm.lr": [0.001, 0.5], "domains.target": ["1", "8"]}
    tables = studying.run(studying.prepare(planned, Progress.silent()), tmp_path, Progress.silent(), jobs=1)
    found = pd.read_parquet(tmp_path / "study.parquet")
    assert len(found) == len(tables.study) == 8
    means = found.groupby("algorithm.lr")["selected/target_loss"].mean()
    folders = [p.parent for p in tmp_path.rglob("summary.json")]
    each = {f: yaml.safe_load((f / "config.yaml").read_text()) for f in folders}
    for rate in (0.001, 0.5):
        mine = [summary_of(f)["selected"]["eval/target_loss"] for f, c in each.items() if c["algorithm"]["lr"] == rate]
        assert len(mine) == 4
        assert means[rate] == pytest.approx(np.mean(mine))
    assert "domains.target" in (tmp_path / "report.html").read_text()


def test_the_line_that_is_learnt_is_measured_and_drawn(rect):
    from safetensors.numpy import load_file

    z = load_model(rect.folder / "model.safetensors", fedfleet.Experiment(fedfleet.load(RECT)).z)["x"]
    w, b = z["1.weight"][1] - z["1.weight"][0], z["1.bias"][1] - z["1.bias"][0]
    assert rect.summary["final"]["eval/boundary_distance"] == pytest.approx(float(b.abs() / w.norm()), rel=1e-5)
    decision_boundary = load_file(rect.folder / "decision_boundary.safetensors")
    assert (decision_boundary["x"].shape, set(decision_boundary["domain"])) == ((800, 2), {0, 1, 2, 3})
    first, second = decision_boundary["axes"]
    assert first[0] < decision_boundary["x"][:, 0].min()
    assert second[-1] > decision_boundary["x"][:, 1].max()
    margin = decision_boundary["log_probability"][..., 1] - decision_boundary["log_probability"][..., 0]
    want = first[None] * float(w[0]) + second[:, None] * float(w[1]) + float(b)
    np.testing.assert_allclose(margin, want, rtol=1e-3, atol=1e-3)


def test_examples_that_are_no_points_have_no_plane(tmp_path):
    done = fedfleet.run(BASE, {"rounds": 1}, out=tmp_path / "run")
    assert not (done.folder / "decision_boundary.safetensors").exists()
    assert "eval/boundary_distance" not in done.summary["final"]
