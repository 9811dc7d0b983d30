"""Metrics of torchmetrics and scikit-learn by name: of all examples, as the libraries have them, or refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sklearn.metrics as sk
import torch
import torchmetrics.functional as tm
from torch import nn

import fedfleet
from fedfleet.assembly import measures
from fedfleet.simulator.driver.evaluation import less_is_better
from fedfleet.tasks import from_module
from fedfleet.tasks.metrics import made_up, told
from tests.refusals import all_say, tells

G = torch.Generator().manual_seed(3)
LOGITS, Y = torch.randn(90, 4, generator=G), torch.randint(0, 4, (90,), generator=G)
LIKELY, GUESS = LOGITS.double().softmax(1), LOGITS.argmax(1)
CONFIG: dict[str, Any] = {
    "rounds": 2, "population": {"clients": 12}, "task": {"model": "logistic"},
    "algorithm": {"name": "fedavg", "lr": 0.1, "batch_size": 4, "steps": 3}, "cohort": {"size": 4},
    "executor": {"kind": "local"},
}  # fmt: skip
MACRO = {"name": "torchmetrics:F1Score", "arguments": {"average": "macro"}, "label": "f1_macro"}


def measured(metric: Any, loss: str = "cross_entropy", outputs: torch.Tensor = LOGITS, y: torch.Tensor = Y) -> float:
    task = from_module(lambda: nn.Linear(1, 4), loss=loss, metrics=[metric])
    found = task.metrics(outputs, {"y": y})
    assert (str(task.metrics(outputs, {"y": y})), list(found)[1:]) == (str(found), ["loss"])
    return next(iter(found.values()))


def per_label(f: Any, y: torch.Tensor, scores: torch.Tensor, **given: Any) -> float:
    return float(f(y.numpy(), scores.numpy(), **given))


YES, FIRST = Y % 2, LOGITS[:, 0]
TWO = ("cross_entropy", LOGITS[:, :2], YES)
SEVERAL = (LOGITS + torch.randn(90, 4, generator=G) > 0).long()
NUMBERS = LOGITS[:, :1] + torch.randn(90, 1, generator=G)
YES_NO = "bce_with_logits"
BINARY = {"name": "torchmetrics:F1Score", "arguments": {"task": "binary"}}
TOP = {"name": "sklearn:top_k_accuracy_score", "arguments": {"k": 3}}
WANTED: list[tuple[Any, Any, Any]] = [
    (MACRO, (), per_label(sk.f1_score, Y, GUESS, average="macro")),
    ("torchmetrics:F1Score", (), per_label(sk.accuracy_score, Y, GUESS)),  # whose average is micro, if nothing is said
    ("torchmetrics:AUROC", (), float(tm.auroc(LIKELY, Y, task="multiclass", num_classes=4))),
    ("torchmetrics.classification:MulticlassRecall", (), per_label(sk.recall_score, Y, GUESS, average="macro")),
    ("sklearn:balanced_accuracy_score", (), per_label(sk.balanced_accuracy_score, Y, GUESS)),
    ("sklearn:cohen_kappa_score", (), per_label(sk.cohen_kappa_score, Y, GUESS)),
    ("sklearn:log_loss", (), per_label(sk.log_loss, Y, LIKELY)),
    ("sklearn:roc_auc_score", (), per_label(sk.roc_auc_score, Y, LIKELY, multi_class="ovr")),
    (TOP, (), per_label(sk.top_k_accuracy_score, Y, LIKELY, k=3)),
    ("sklearn:average_precision_score", TWO, per_label(sk.average_precision_score, YES, TWO[1].diff(dim=1)[:, 0])),
    (BINARY, TWO, per_label(sk.f1_score, YES, TWO[1].argmax(1))),
    ("sklearn:f1_score", (YES_NO, LOGITS[:, :1], YES), per_label(sk.f1_score, YES, (LOGITS[:, 0] > 0).long())),
    ("sklearn:roc_auc_score", (YES_NO, LOGITS, SEVERAL), per_label(sk.roc_auc_score, SEVERAL, LOGITS)),
    (MACRO, (YES_NO, LOGITS, SEVERAL), per_label(sk.f1_score, SEVERAL, (LOGITS > 0).long(), average="macro")),
    ("torchmetrics:MeanSquaredError", ("mse", NUMBERS, FIRST), float((NUMBERS[:, 0] - FIRST).square().mean())),
    ("sklearn:max_error", ("mse", NUMBERS, FIRST), float((NUMBERS[:, 0] - FIRST).abs().max())),
]


@pytest.mark.parametrize(("metric", "of", "wanted"), WANTED)
def test_they_are_the_libraries_of_all_examples(metric, of, wanted):
    assert measured(metric, *of) == pytest.approx(wanted, abs=1e-6)


def test_a_label_that_does_not_count_and_a_class_that_is_not_there():
    some = Y.clone()
    some[::3] = -100
    kept = some >= 0
    wanted = per_label(sk.balanced_accuracy_score, Y[kept], GUESS[kept])
    assert measured("sklearn:balanced_accuracy_score", y=some) == pytest.approx(wanted)
    assert math.isnan(measured("sklearn:roc_auc_score", y=Y * 0))
    assert math.isnan(measured("sklearn:r2_score", "mse", NUMBERS[:1], LOGITS[:1, 0]))


def test_every_class_is_among_what_is_made_up():
    task = from_module(lambda: nn.Linear(1, 4))
    few = made_up(told(task.loss, LOGITS[:1], Y[:1]))
    assert few.true.unique().tolist() == [0, 1, 2, 3]
    assert not few.few
    assert 0 < float((few.scores.argmax(1) == few.true).double().mean()) < 1
    assert few.scores.sum(1).tolist() == pytest.approx([1] * len(few.true))


def test_a_run_measures_them_of_the_whole_split_and_goes_on(tmp_path):
    metrics = [MACRO, "sklearn:balanced_accuracy_score", "f1"]
    run = fedfleet.run(CONFIG, {"task.metrics": metrics, "checkpoint.best": "eval/f1_macro"}, out=tmp_path / "run")
    final, plain = run.summary["final"], fedfleet.run(CONFIG, out=tmp_path / "plain")
    assert (run.folder / "model.safetensors").read_bytes() == (plain.folder / "model.safetensors").read_bytes()
    task, test = run.task, fedfleet.Experiment(fedfleet.load(CONFIG)).evaluation["test"]
    with torch.no_grad():
        guess = run.model()(test["x"]).argmax(1)
    assert final["eval/f1_macro"] == pytest.approx(sk.f1_score(test["y"], guess, average="macro"), abs=1e-6)
    assert final["eval/f1"] == pytest.approx(final["eval/f1_macro"], abs=1e-6)
    assert final["eval/balanced_accuracy_score"] == pytest.approx(sk.balanced_accuracy_score(test["y"], guess))
    assert list(task.chosen) == ["f1_macro", "balanced_accuracy_score", "f1"]
    longer = fedfleet.resume(run.folder, {"rounds": 3})
    whole = fedfleet.run(CONFIG, {"task.metrics": metrics, "rounds": 3}, out=tmp_path / "whole")
    assert longer.summary["final"] == whole.summary["final"]


def test_what_torchmetrics_would_drop_is_refused(subtests):
    rows = [
        (({"average": "macro"}, (YES_NO, FIRST, YES)), "average='macro': BinaryF1Score"),
        (({"top_k": 2}, (YES_NO, LOGITS, SEVERAL)), "top_k=2: MultilabelF1Score"),
        (({"threshold": 0.3}, ()), "threshold=0.3: MulticlassF1Score"),
        (({"task": "binary", "average": "macro"}, TWO), "average='macro': BinaryF1Score"),
    ]  # fmt: skip
    all_say(subtests, lambda row: measured({"name": "torchmetrics:F1Score", "arguments": row[0]}, *row[1]), rows)


def test_what_cannot_be_is_refused_before_work(subtests):
    def call(metric):
        fedfleet.Experiment(fedfleet.load(CONFIG, {"task.metrics": [metric]}))

    rows = [
        ("torchmetrics:F1Scor", "task.metrics='torchmetrics:F1Scor'"),
        ("torchmetrics:F1Scor", "did you mean torchmetrics:F1Score?"),
        ("sklearn:make_scorer", "sklearn.metrics has no such metric, a function of y_true and predictions"),
        ("torchmetrics.clas:F1Score", "there is no module 'torchmetrics.clas'"),
        ({"name": "sklearn:f1_score", "arguments": {"averag": "macro"}},
         "task.metrics.0.arguments.averag='macro': f1_score takes"),
        ({"name": "sklearn:f1_score"}, "task.metrics='sklearn:f1_score': of multiclass it fails (ValueError"),
        ("sklearn:confusion_matrix", "it gives a ndarray, and a metric is one number"),
        ({"name": "torchmetrics:F1Score", "arguments": {"average": "none"}},
         "it gives a Tensor, and a metric is one number"),
        ({"name": "f1", "arguments": {"average": "micro"}},
         "task.metrics.0.arguments={'average': 'micro'}: f1 takes none"),
        ({"name": "sklearn:zero_one_loss", "label": "loss"}, "task.metrics: 'loss' is there twice"),
        ("accuracy", "task.metrics: 'accuracy' is there twice"),
        ({"name": "f1", "lable": "a"}, "task.metrics.0.lable='a': unknown key"),
        ({"name": "torchmetrics:CalibrationError", "label": "calibration_score"},
         "less of it is better, and its name says otherwise"),
    ]  # fmt: skip
    all_say(subtests, call, rows)


def test_what_is_not_installed_or_too_large_is_refused(monkeypatch):
    config = fedfleet.load(CONFIG, {"task.metrics": ["torchmetrics:AUROC"]})
    examples = len(fedfleet.Experiment(config).evaluation["test"]["y"])
    monkeypatch.setattr(measures, "memory_bytes", lambda: 8 * 8 * 10 * examples - 1)
    tells(lambda: fedfleet.Experiment(config), f"it needs the predictions of all {examples} examples at once")
    monkeypatch.setattr(measures, "memory_bytes", lambda: 8 * 8 * 10 * examples)
    assert fedfleet.Experiment(config)
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics", None)
    tells(lambda: fedfleet.Experiment(config), "torchmetrics is not installed: pip install 'fedfleet[metrics]'")


def test_the_end_of_a_name_says_what_is_better():
    for name in ("brier_score_loss", "score_loss", "mean_poisson_deviance", "loss", "log_loss_worst_domain"):
        assert less_is_better(name), name
    for name in ("d2_log_loss_score", "F1Score", "error_score", "score_worst_domain", "matthews_corrcoef"):
        assert not less_is_better(name), name
