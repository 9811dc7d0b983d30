"""Classes on record: counts of the last model's predictions, on the same examples as its accuracy.

Only tasks that have classes keep them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedfleet
from fedfleet.simulator.driver.evaluation import confusions, recalls, says_classes

BASE: dict[str, Any] = {
    "rounds": 3, "population": {"clients": 9, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "task": {"name": "classification", "model": "logistic"}, "algorithm": {"name": "fedavg", "lr": 0.05, "steps": 2},
    "cohort": {"size": 6}, "executor": {"kind": "local"}, "evaluation": {"every": 2},
}  # fmt: skip


def right(table: pd.DataFrame) -> float:
    return table.loc[table["label"] == table["predicted"], "examples"].sum() / table["examples"].sum()


def test_counts_are_of_the_last_model_and_all_test_examples(tmp_path):
    done = fedfleet.run(BASE, {"evaluation.test_examples": 50}, out=tmp_path / "run")
    found = pd.read_parquet(done.folder / "classes.parquet")
    assert list(found.columns) == ["rounds", "label", "predicted", "examples"]
    assert (set(found.dtypes), set(found["rounds"])) == ({np.dtype("int64")}, {3})
    final = done.summary["final"]
    assert right(found) == pytest.approx(final["eval/all_accuracy"], abs=1e-12)
    assert final["eval/all_accuracy"] != final["eval/accuracy"], "a test that cannot fail"
    assert found["examples"].sum() > 50
    assert found.equals(found.sort_values(["label", "predicted"], ignore_index=True))
    again = fedfleet.resume(done.folder, {"rounds": 4})
    assert set(pd.read_parquet(again.folder / "classes.parquet")["rounds"]) == {4}
    whole = fedfleet.run(BASE, {"evaluation.test_examples": 50, "rounds": 4}, out=tmp_path / "whole")
    same = [(run.folder / "classes.parquet").read_bytes() for run in (again, whole)]
    assert same[0] == same[1]


def test_domains_are_counted_apart(tmp_path):
    domains = {"dataset": {"name": "digits", "classes": [1, 4, 8], "label_domains": True}, "clients": 9}
    config = {**BASE, "population": {**domains, "partition": {"kind": "by_domain"}}, "rounds": 2}
    done = fedfleet.run(config, out=tmp_path / "run")
    found = pd.read_parquet(done.folder / "classes.parquet")
    last = done.table("domains").query("round == 1").set_index("domain")
    assert set(found["domain"]) == {0, 1, 2}
    for domain, mine in found.groupby("domain"):
        assert right(mine) == pytest.approx(last.loc[domain, "accuracy"], abs=1e-12)
        assert mine["examples"].sum() == last.loc[domain, "examples"]


def test_a_robust_task_is_counted_under_its_perturbation_and_one_without_classes_not_at_all(tmp_path):
    robust = {
        **BASE, "task": {"name": "robust", "model": "logistic", "ascent_steps": 3, "ascent_lr": 30.0}, "rounds": 1,
    }  # fmt: skip
    done = fedfleet.run(robust, {"algorithm": {"name": "local_sgda"}}, out=tmp_path / "robust")
    found, final = pd.read_parquet(done.folder / "classes.parquet"), done.summary["final"]
    assert right(found) == pytest.approx(final["eval/robust_accuracy"], abs=1e-12)
    assert final["eval/robust_accuracy"] != final["eval/accuracy"], "a test that cannot fail"
    auc = {**BASE, "task": {"name": "auc", "model": "logistic"}, "rounds": 1}
    done = fedfleet.run(auc, {"algorithm": {"name": "local_sgda"}}, out=tmp_path / "auc")
    assert not (done.folder / "classes.parquet").exists()


@pytest.mark.parametrize(("loss", "outputs", "y"), [
    ("cross_entropy", 3, [0, 1, 2]), pytest.param("bce_with_logits", 1, [0, 1, 1], marks=pytest.mark.slow),
    (lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none"), 3, [0, 1, 2]),
])  # fmt: skip
def test_a_net_of_ones_own_is_counted_where_an_example_has_a_class(tmp_path, loss, outputs, y):
    x = np.random.default_rng(0).normal(size=(90, 2)).astype("float32")
    data = fedfleet.data.from_arrays(x, y * 30, client=np.arange(90) // 10, test=0.4)
    task = fedfleet.tasks.from_module(lambda: nn.Linear(2, outputs), loss=loss, metrics=["accuracy"])
    config = {"rounds": 2, "cohort": {"size": 3}, "executor": {"kind": "local"}}
    done = fedfleet.run(config, task=task, data=data, out=tmp_path / "run")
    found = done.table("classes")
    assert right(found) == pytest.approx(done.summary["final"]["eval/accuracy"], abs=1e-12)
    assert 0 < right(found) < 1, "a test that cannot fail"
    assert found["examples"].sum() == len(data.test.y)
    report = fedfleet.write_report([done.folder], tmp_path / "report")
    assert "Recall and precision" in report.read_text(encoding="utf-8")


def test_what_is_left_out_has_no_class_and_numbers_and_several_labels_have_none():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    task = fedfleet.tasks.from_module(lambda: nn.Linear(2, 2))
    found = confusions(task, logits, {"y": torch.tensor([0, -100, 1])})
    assert [found[name].tolist() for name in ("label", "predicted", "examples")] == [[0, 1], [0, 0], [1, 1]]
    yes_no = fedfleet.tasks.from_module(lambda: nn.Linear(2, 2), loss="bce_with_logits")
    assert confusions(yes_no, logits[:, 0], {"y": torch.tensor([1.0, 0.7, 0.0])}) is None
    assert confusions(yes_no, logits, {"y": torch.ones(3, 2)}) is None
    assert confusions(task, torch.zeros(3, 2, 4), {"y": torch.zeros(3, 4, dtype=torch.int64)}) is None
    assert not says_classes(fedfleet.tasks.from_module(lambda: nn.Linear(2, 2), loss="mse"))


def test_by_hand_and_what_is_no_class_an_example():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [1.0, 0.0]])
    data = {"y": torch.tensor([0, 1, 1, 0]), "domain": torch.tensor([1, 0, 0, 1])}
    likely: Any = SimpleNamespace(probabilities=lambda outputs: outputs.softmax(1))
    found = confusions(likely, logits, data)
    assert {name: column.tolist() for name, column in found.items()} == {
        "domain": [0, 0, 1],
        "label": [1, 1, 0],
        "predicted": [0, 1, 0],
        "examples": [1, 1, 2],
    }
    says: Any = SimpleNamespace(probabilities=None, predicted=lambda outputs: 1 - outputs.argmax(1))
    found = confusions(says, logits, {"y": data["y"]})
    assert found["predicted"].tolist() == [1, 0, 1]
    assert confusions(SimpleNamespace(probabilities=None), logits, data) is None  # type: ignore[arg-type]
    odd: Any = SimpleNamespace(probabilities=lambda outputs: outputs[:, 0])
    assert confusions(odd, logits, data) is None
    several: Any = {"y": torch.zeros(4, 3, dtype=torch.int64)}
    assert confusions(likely, logits, several) is None


def test_recall_is_kept_at_every_evaluation_and_names_stand_beside_numbers(tmp_path):
    domains = {"dataset": {"name": "digits", "classes": [1, 4, 8], "label_domains": True}, "clients": 9}
    config = {**BASE, "population": {**domains, "partition": {"kind": "by_domain"}}, "rounds": 4}
    done = fedfleet.run(config, out=tmp_path / "run")
    found, classes, rounds = done.table("recall"), done.table("classes"), done.rounds.set_index("round")
    assert found["round"].unique().tolist() == [1, 3]
    for at, of in found.groupby("round"):
        share = (of["recall"] * of["examples"]).sum() / of["examples"].sum()
        assert share == pytest.approx(rounds.loc[at, "eval/accuracy"], abs=1e-12)
    last = found[found["round"] == 3].set_index("label")
    for label, rows in classes.groupby("label"):
        assert last.loc[label, "recall"] == right(rows)
    for label, rows in classes.groupby("predicted"):
        assert last.loc[label, "precision"] == right(rows)
    assert done.table("domains")["name"].tolist() == ["1", "4", "8"] * 2
    assert classes["domain_name"].tolist() == [("1", "4", "8")[k] for k in classes["domain"]]
    half = fedfleet.run({**config, "rounds": 2}, out=tmp_path / "half")
    again = fedfleet.resume(half.folder, {"rounds": 4})
    assert again.table("recall").equals(found)


def test_names_of_classes_stand_in_the_tables(tmp_path):
    x = np.random.default_rng(0).normal(size=(90, 2)).astype("float32")
    data = fedfleet.data.from_arrays(x, ["no", "yes", "perhaps"] * 30, client=np.arange(90) // 10, test=0.4)
    task = fedfleet.tasks.from_module(lambda: nn.Linear(2, 3))
    done = fedfleet.run(
        {"rounds": 1, "cohort": {"size": 3}, "executor": {"kind": "local"}}, task=task, data=data, out=tmp_path / "a"
    )
    names = done.summary["examples"]["class_names"]
    for table, number, name in (
        ("classes", "label", "label_name"),
        ("classes", "predicted", "predicted_name"),
        ("recall", "label", "name"),
    ):
        found = done.table(table)
        assert found[name].tolist() == [names[k] for k in found[number]]


def test_recalls_by_hand():
    found = recalls(
        {"label": torch.tensor([0, 0, 2]), "predicted": torch.tensor([0, 1, 0]), "examples": torch.tensor([3, 1, 2])}, 4
    )
    assert found["examples"].tolist() == [4, 0, 2, 0]
    assert found["recall"].tolist()[::2] == [0.75, 0.0]
    assert found["precision"].tolist()[:2] == [0.6, 0.0]
    assert found["recall"].isnan().tolist() == [False, True, False, True]
    assert recalls({name: torch.tensor([2000]) for name in ("label", "predicted", "examples")}, 4) == {}
