"""Domains from a configuration to the tables, the report and a paper's table."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import fedfleet
from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.assembly.duality_gap import DomainLosses
from fedfleet.commands.plan import describe
from fedfleet.datasets.files import DataError
from fedfleet.experiments import campaign
from fedfleet.report import domain_figures, write_report
from fedfleet.report.tables import domain_names
from fedfleet.report.tables import read as read_run
from fedfleet.simulator.algorithm import Saddle
from fedfleet.simulator.errors import ConfigError
from tests.algorithms.agnostic import TWO, at
from tests.algorithms.harness import Bowl
from tests.front.experiments.resuming import THREE
from tests.refusals import all_say

BASE: dict[str, Any] = {
    "rounds": 6,
    "population": THREE,
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "afl", "lr": 0.05, "dual": {"lr": 0.05}}, "cohort": {"size": 9},
    "executor": {"kind": "local"}, "evaluation": {"every": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> fedfleet.Run:
    return fedfleet.Experiment(fedfleet.load(BASE)).run(tmp_path_factory.mktemp("afl") / "run")


def test_every_domain_is_evaluated_on_its_own_test_examples(run):
    x = fedfleet.Experiment(fedfleet.load(BASE))
    z = {"x": {k.removeprefix("x."): v for k, v in load_file(run.folder / "model.safetensors").items()}}
    data = x.evaluation["test"]
    right = x.task.logits(z, data["x"]).argmax(1) == data["y"]
    wanted = [float(right[data["y"] == k].double().mean()) for k in range(3)]
    last = run.table("domains").query("round == 5")
    assert last["domain"].tolist() == [0, 1, 2]
    assert last["accuracy"].tolist() == pytest.approx(wanted)
    assert last["examples"].tolist() == data["y"].bincount().tolist()
    final = run.summary["final"]
    assert final["eval/accuracy_worst_domain"] == pytest.approx(min(wanted))
    assert final["eval/accuracy_spread"] == pytest.approx(max(wanted) - min(wanted))
    assert final["eval/loss_worst_domain"] == pytest.approx(last["loss"].max())
    assert last["lambda"].sum() == pytest.approx(1.0)
    assert not np.allclose(last["lambda"], 1 / 3, atol=1e-3)
    assert run.table("domains")["round"].unique().tolist() == [2, 5]


def test_fedavg_is_measured_by_domain_too(tmp_path):
    done = fedfleet.run(BASE, {"algorithm": "fedavg", "population.partition": "iid"}, out=tmp_path / "run")
    found = done.table("domains")
    assert found["round"].tolist() == [2] * 3 + [5] * 3
    assert done.summary["final"]["eval/accuracy_worst_domain"] == found["accuracy"][3:].min()
    assert done.summary["domains"] == ["1", "4", "8"]


@pytest.mark.slow
def test_the_report_calls_domains_by_their_names(run, tmp_path):
    assert run.summary["domains"] == ["1", "4", "8"]
    groups = {"run": [read_run(run.folder)]}
    assert domain_names(groups) == ["1", "4", "8"]
    (tmp_path / "other").mkdir()
    for file in run.folder.glob("*.*"):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "other" / "summary.json").write_text(json.dumps({**run.summary, "domains": ["a", "b", "c"]}))
    both = {**groups, "other": [read_run(tmp_path / "other")]}
    assert domain_names(both) == []
    assert domain_figures.draw(both)


def test_the_plan_tells_the_domains():
    lines = dict(describe(fedfleet.Experiment(fedfleet.load(BASE))))
    assert lines["domains"] == "3 with 140 to 146 examples each; skewness 3.08"
    plain = {"algorithm": "fedavg"}
    assert "domains" not in dict(
        describe(fedfleet.Experiment(fedfleet.load(BASE, {**plain, "population.partition": "iid"})))
    )


class Losses(Bowl):
    functions = {  # noqa: RUF012
        "per_example": lambda z, batch: {"loss": batch.x[:, 0] * (z["x"]["w"] - batch.x[:, 1]) ** 2 / 2}
    }


def test_the_duality_gap_of_a_toy_is_that_worked_out_by_hand():
    sizes = torch.ones(2)
    for point, first, chi2 in ((2.0, 2 / 3, 0.0), (1.0, 0.25, 0.0), (0.5, 0.9, 0.3)):
        dual = Dual.of(DualOptions(chi2=chi2), sizes)
        mixture = torch.tensor([first, 1 - first], dtype=torch.float64)
        saddle = Saddle(at(point), mixture, dual.at, dual.value, lambda z: torch.zeros(()))
        a, b = first, 4 * (1 - first)  # curvatures, around 0 and 3
        regular = chi2 * 2 * ((first - 0.5) ** 2 + (0.5 - first) ** 2)
        least = a * b / (a + b) * 9 / 2 - regular
        grid = torch.linspace(0, 1, 200_001, dtype=torch.float64)
        one, two = point**2 / 2, 4 * (point - 3) ** 2 / 2
        most = (grid * one + (1 - grid) * two - chi2 * 4 * (grid - 0.5) ** 2).max()
        found = DomainLosses(Losses(), TWO.population).gap(saddle)
        assert found == pytest.approx(float(most) - least, abs=1e-6)
    assert DomainLosses(Losses(), TWO.population).gap(  # the saddle itself
        Saddle(at(2.0), torch.tensor([2 / 3, 1 / 3]).double(), torch.dot, lambda v: float(v.max()), lambda z: v0)
    ) == pytest.approx(0.0, abs=1e-7)


v0 = torch.zeros(())


@pytest.mark.slow
def test_the_duality_gap_of_a_run_falls(tmp_path):
    given = {"evaluation.duality_gap": True, "evaluation.every": 50, "rounds": 200, "algorithm.batch_size": None}
    found = fedfleet.run(BASE, given, out=tmp_path / "run")
    gaps = [found.summary["initial"]["eval/duality_gap"], *found.rounds["eval/duality_gap"].dropna()]
    assert gaps == sorted(gaps, reverse=True)
    assert 0 < gaps[-1] < 0.6 * gaps[1]


def test_a_duality_gap_that_is_none(subtests):
    def call(change):
        fedfleet.Experiment(fedfleet.load(BASE, {"evaluation.duality_gap": True, **change}))

    rows = [
        ({"algorithm": "fedavg"}, "evaluation.duality_gap=true: fedavg"),
        ({"task.model": "mlp"}, "set task.model=logistic"),
    ]  # fmt: skip
    all_say(subtests, call, rows)


CLUSTERS = {
    "population.clients": 40, "population.partition.kind": "label_sorted", "population.dataset.label_domains": False,
    "domains": {"kind": "clusters", "count": 3, "min_examples": 30}, "evaluation": {"every": 3, "per_client": True},
    "cohort.size": 20,
}  # fmt: skip


def test_domains_without_test_examples_are_measured_on_their_clients_own(tmp_path):
    x = fedfleet.Experiment(fedfleet.load(BASE, CLUSTERS))
    run = x.run(tmp_path / "run")
    everybody = torch.arange(40)
    domain, examples = x.population.domains(everybody).numpy(), x.population.num_examples(everybody).numpy()
    assert domain.max() > 1
    for index in (2, 5):
        each = run.table("clients").query(f"round == {index}")
        found = run.table("domains").query(f"round == {index}")
        for metric in ("accuracy", "loss"):
            mine = each[metric].to_numpy()
            want = [np.average(mine[domain == k], weights=examples[domain == k]) for k in range(domain.max() + 1)]
            assert found[f"clients_{metric}"].tolist() == pytest.approx(want)
    final = run.summary["final"]
    assert final["eval/clients_accuracy_worst_domain"] == pytest.approx(found["clients_accuracy"].min())
    assert final["eval/clients_loss_worst_domain"] == pytest.approx(found["clients_loss"].max())
    assert list(run.summary["initial"]) == list(final) == x.metric_names()


def test_a_run_that_goes_on_has_the_same_domains(run, tmp_path):
    fedfleet.Experiment(fedfleet.load(BASE, {"rounds": 4})).run(tmp_path / "run")
    longer = fedfleet.resume(tmp_path / "run", {"rounds": 6})
    pd.testing.assert_frame_equal(longer.table("domains"), run.table("domains"), check_exact=True)
    for name in ("model", "best"):
        assert (longer.folder / f"{name}.safetensors").read_bytes() == (run.folder / f"{name}.safetensors").read_bytes()


def test_drfa_with_every_client_a_domain(tmp_path):
    given = {"algorithm": {"name": "drfa", "steps": 3, "dual.lr": 0.01}, "domains": "client", "cohort.size": 4}
    done = fedfleet.Experiment(fedfleet.load(BASE, given)).run(tmp_path / "run")
    assert (len(done.table("domains")), done.table("phases")["phase"].tolist()) == (2 * 9, ["train", "loss"] * 6)
    assert "accuracy" not in done.table("domains")  # no test example is of a client
    assert "eval/accuracy_worst_domain" not in done.summary["final"]
    last = done.table("domains").query("round == 5")["train_loss"]
    assert last.notna().sum() >= 4  # what was heard once stays known
    assert last.max() < 3


@pytest.mark.slow
def test_the_agnostic_model_is_better_where_the_other_is_worst(tmp_path):
    """The largest loss of a domain is lower at the end, with every example in every step."""
    more = {"population.dataset.classes": [1, 8, 9, 5], "population.clients": 12, "cohort.size": 12, "rounds": 60}
    more |= {
        "evaluation.every": 60, "algorithm.optimizer.name": "adam", "algorithm.lr": 0.01, "algorithm.average": False,
    }  # fmt: skip
    more |= {"algorithm.batch_size": None}
    worst = {}
    for name, dual in {"agnostic": {"lr": 0.02}, "uniform": {"lambda_set": {"kind": "sizes"}}}.items():
        done = fedfleet.Experiment(fedfleet.load(BASE, {**more, "algorithm.dual": dual})).run(tmp_path / name)
        worst[name] = done.table("domains")["train_loss"].max()
    assert worst["agnostic"] < 0.9 * worst["uniform"]


@pytest.mark.slow
def test_the_report_draws_lambda(run, tmp_path):
    page = write_report([run.folder], tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "lambda by domain" in text
    assert "accuracy by domain" in text
    assert (tmp_path / "figures" / "domains-lambda.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_report_draws_many_domains_as_a_heat_map(tmp_path):
    dataset = {"name": "synthetic", "domains": 40, "features": 5, "test_examples": 200}
    config = {**BASE, "population": {"dataset": dataset, "clients": 80}, "cohort": {"size": 20}}
    done = fedfleet.Experiment(fedfleet.load(config)).run(tmp_path / "run")
    assert done.summary["final"]["eval/accuracy_worst_tenth"] >= done.summary["final"]["eval/accuracy_worst_domain"]
    text = write_report([done.folder], tmp_path).read_text(encoding="utf-8")
    assert "Colour is the mean of neighbouring domains" in text


def test_mistakes_are_told_in_one_line_before_work_starts(subtests, tmp_path):
    rows = [
        ({"domains": {"kind": "clusters", "count": 20}}, "domains='clusters': count=20: there are only 9 clients"),
        ({"domains": "clients"}, "domains.kind='clients': unknown; did you mean 'client'?"),
        ({"population.dataset.classes": [1, 11]},
         "population.dataset.classes=[1, 11]: give different labels from 0 to 9"),
        ({"algorithm.dual.lambda_set": {"kind": "simplex", "domains": [7]}}, "there is no domain 7, they are 0 to 2"),
        ({"algorithm.dual.lambda_set.kind": "hull"}, "kind: hull needs vertices"),
        ({"algorithm.dual.lambda_set.high": 1.5}, "high does not belong to kind: simplex"),
        ({"selection": "examples"}, "selection.kind='examples'"),
        ({"population.partition": "iid"}, "population.partition='iid'"),
        ({"algorithm.norm_penalty": 0.1, "algorithm.steps": 2},
         "norm_penalty is a proximal step after one of plain SGD"),
        ({"algorithm": {"method": "best_response", "dual": {"chi2": 1.0, "lambda_set": {"kind": "capped"}}}},
         "the best response to it is known on the whole simplex only"),
        ({"algorithm": {"name": "drfa", "lambda_floor": 0.1, "dual": {"lambda_set": {"domains": [0, 2]}}}},
         "algorithm.lambda_floor"),
        ({"algorithm": {"name": "drfa", "lambda_floor": 0.5}},
         "algorithm.lambda_floor=0.5: 3 domains would weigh more than 1"),
        ({"algorithm": {"name": "drfa"}, "cohort.resample": False}, "cohort.resample=false"),
        ({"algorithm": {"gradient": "weighted"}, "cohort.resample": False}, "cohort.resample=false: afl draws"),
        ({"algorithm": {"name": "drfa"}, "cohort.late": "keep"}, "what clients of drfa send in phase 'train'"),
        ({"algorithm": {"name": "qffl"}, "task": "auc"}, "algorithm.name='qffl': it minimises, and task.name='auc'"),
        ({"algorithm": {"theory": {"rounds": 7, "gradient": 1.0, "losses": 1.0}, "radius": 1.0, "lr": 0.1},
         "algorithm.dual.lr": 0.01}, "algorithm.theory.rounds=7: the run has rounds="),
        ({"algorithm": {"method": "best_response", "strong_convexity": 1.0}, "cohort.size": 9, "task.model": "mlp"},
         "task.model='mlp'"),
        ({"population": {"dataset": {"name": "synthetic", "classes": 4}, "clients": 10**9, "partition": "iid"}},
         "algorithm='afl': it looks at every client once, 1,000,000,000 of them"),
    ]  # fmt: skip
    all_say(subtests, lambda given: fedfleet.Experiment(fedfleet.load(BASE, given)), rows, (ConfigError, DataError))


TABLE = """
title: Digits
source: a paper
config: digits.yaml
columns: {all: accuracy, ones: "accuracy[0]", eights: "accuracy[2]"}
worst_of: [ones, eights]
scale: 100
baseline: plain
paper: {plain: {all: [90.0, 1.5], ones: 91, worst: 88.0}}
"""


def test_a_table_is_written_though_runs_failed(tmp_path, command):
    compare = {"plain": {}, "diverging": {"algorithm.lr": 1e30, "algorithm.average": False}}
    (tmp_path / "digits.yaml").write_text(json.dumps({**BASE, "seeds": [0, 1], "compare": compare}))
    table = "title: Digits\nsource: a paper\nconfig: digits.yaml\ncolumns: {all: accuracy, ones: 'accuracy[0]'}\nbaseline: plain\n"
    (tmp_path / "table.yaml").write_text(table)
    _, _, error = command("paper", tmp_path / "table.yaml", "--jobs", 1, "--out", tmp_path / "out")
    assert "2 of 4 trials: diverging" in error
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert any(line.startswith("| diverging | ours | none | none") for line in lines)
    assert any(line.startswith("| plain | ours | 0.") for line in lines)
    assert json.loads((tmp_path / "out" / "table.json").read_text())["diverging"]["all"] == [None, None]


@pytest.mark.slow
def test_a_papers_table(tmp_path, command, monkeypatch):
    compare = {"plain": {"algorithm.dual.lambda_set.kind": "sizes"}, "agnostic": {}}
    (tmp_path / "digits.yaml").write_text(json.dumps({**BASE, "seeds": [0, 1], "compare": compare}))
    (tmp_path / "table.yaml").write_text(TABLE)
    made: list[str] = []
    ready = campaign.prepare
    monkeypatch.setattr(campaign, "prepare", lambda trial, data: made.append(trial.name) or ready(trial, data))

    status, said, _ = command("paper", tmp_path / "table.yaml", "--out", tmp_path / "out", "--jobs", 1)
    assert status == 0
    assert made == ["plain", "agnostic"]  # once each
    lines = said.splitlines()
    assert lines[0] == "Digits (a paper); ours: mean ± standard deviation over 2 seeds"
    assert lines[2] == "| trained on | | all | ones | eights | worst | worst of the means |"
    assert lines[5] == "| | paper | 90.00 ± 1.50 | 91.00 |  |  | 88.00 |"
    assert lines[10] == "| trained on | all | ones | eights | worst |"
    assert "of 2)" in lines[12]
    values = json.loads((tmp_path / "out" / "table.json").read_text())
    one = fedfleet.Experiment(fedfleet.load({**BASE, "seed": 1})).run(tmp_path / "one")
    assert values["agnostic"]["all"][1] == pytest.approx(100 * one.summary["final"]["eval/accuracy"])
    eights = one.table("domains").query("domain == 2")["accuracy"].iloc[-1]
    assert values["agnostic"]["eights"][1] == pytest.approx(100 * eights)
    assert (tmp_path / "out" / "table.md").read_text() == said
    again = command("paper", tmp_path / "table.yaml", "--out", tmp_path / "out", "--jobs", 1)
    assert again[1] == said
    (tmp_path / "table.yaml").write_text(TABLE.replace('"accuracy[2]"', "nonsense"))
    status, _, error = command("paper", tmp_path / "table.yaml", "--out", tmp_path / "out")
    assert status == 2
    assert "columns.eights: metric='nonsense'" in error
    (tmp_path / "table.yaml").write_text(TABLE.replace("worst_of: [ones", "worst_of: [twos"))
    status, _, error = command("paper", tmp_path / "table.yaml", "--out", tmp_path / "out")
    assert (status, error.count("\n")) == (2, 1)
    assert "worst_of: 'twos' is none of the columns all, ones, eights" in error
