"""Own algorithms that take the options of local training at ``algorithm.*``, as ready ones do."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fedfleet
from fedfleet.algorithms.fedavg import AveragingOptions
from fedfleet.experiments import campaign, sweep
from fedfleet.experiments.progress import Progress
from fedfleet.tuning import search
from tests.front.experiments.resuming import check_equal
from tests.refusals import all_say

HERE = "tests.front.experiments.own_parts:"
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "own_parts.md"
CONFIG: dict[str, Any] = {
    "rounds": 3, "population": {"clients": 12}, "task": {"model": "logistic"}, "cohort": {"size": 6},
    "algorithm": {"name": f"{HERE}heated", "lr": 0.1, "batch_size": 4, "steps": 2},
    "executor": {"kind": "local"}, "evaluation": {"every": 3}, "checkpoint": {"every_s": 0},
}  # fmt: skip


def experiment(*overrides: dict[str, Any]) -> fedfleet.Experiment:
    return fedfleet.Experiment(fedfleet.load(CONFIG, {k: v for each in overrides for k, v in each.items()}))


def model(run: fedfleet.Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model().parameters()])


@pytest.fixture
def mifa(beside: Path):
    """A folder with the file that the page shows."""
    (text,) = re.findall(r"^```python\n# mifa\.py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (beside / "mifa.py").write_text(text)
    yield beside
    sys.modules.pop("mifa", None)


@pytest.mark.slow
def test_mifa_of_the_page_is_the_ready_one_for_every_learning_rate(mifa, tmp_path):
    lines = [line for line in (mifa / "mifa.py").read_text().splitlines() if line.strip()]
    docstrings = [
        n for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)
    ]
    assert len(lines) - len(docstrings) <= 20
    given = {
        "availability": {"kind": "bernoulli", "rate": 0.5},
        "population": {"clients": 12, "partition": {"kind": "dirichlet", "alpha": 0.3}},
        "algorithm": {"name": "fedavg", "steps": 3, "lr_schedule": "power", "client_optimizer": {"clip_norm": 1.0}},
        "compare": {"ready": {"algorithm.correction": "mifa"}, "mine": {"algorithm": "mifa:mifa"}},
        "vary": {"algorithm.lr": [0.1, 0.5]},
        "code_dir": str(mifa),
    }
    plan = fedfleet.load({**CONFIG, **given})
    ready, other, mine, last = campaign.run(plan, tmp_path / "runs", Progress.silent(), report=False)
    for one, two in ((ready, mine), (other, last)):
        assert float((model(one) - model(two)).abs().max()) < 1e-6
        ours, own = (yaml.safe_load((r.folder / "config.yaml").read_text())["algorithm"] for r in (one, two))
        assert {k: own[k] for k in AveragingOptions.model_fields} == {k: ours[k] for k in AveragingOptions.model_fields}
        assert (own["name"], len(own["source"])) == ("mifa:mifa", 64)
    assert float((model(mine) - model(last)).abs().max()) > 0.01


def test_own_options_count_and_runs_go_on(tmp_path):
    whole = experiment({"algorithm.heat": 2.0, "algorithm.weight": "uniform"}).run(tmp_path / "whole")
    experiment({"algorithm.heat": 2.0, "algorithm.weight": "uniform", "rounds": 2}).run(tmp_path / "part")
    check_equal(fedfleet.resume(tmp_path / "part", {"rounds": 3}).folder, whole.folder)
    rate = {"algorithm.lr": 0.2, "algorithm.weight": "uniform"}  # a gradient twice as large is a rate twice as large
    assert torch.allclose(model(whole), model(experiment(rate).run(tmp_path / "rate")), atol=1e-7)
    squared = experiment({**rate, "algorithm.lr": 0.05, "algorithm.heat": 2.0, "algorithm.arguments.power": 2})
    assert torch.allclose(model(whole), model(squared.run(tmp_path / "squared")), atol=1e-7)


@pytest.mark.ray
@pytest.mark.slow
def test_workers_take_own_options(tmp_path):
    ray = {"executor.kind": "ray", "executor.actors": 1, "executor.cpus_per_actor": 0.5}
    runs = [experiment({"algorithm.heat": 2.0}, e).run(tmp_path / str(len(e))) for e in ({}, ray)]
    assert torch.equal(*map(model, runs))


def test_options_given_for_another_name_are_kept_where_the_function_takes_them():
    base = {"algorithm": {"lr": 0.3, "steps": 2, "correction": "fedau"}, "label": None}
    compare = {
        "a": {"algorithm": f"{HERE}heated"},
        "b": {"algorithm": f"{HERE}unheated"},
        "c": {"algorithm": f"{HERE}plain"},
    }
    plan = sweep.planned(fedfleet.load({**CONFIG, **base}, {"compare": compare}))
    heated, unheated, plain = (fedfleet.Experiment(trial.config).config.algorithm for trial in plan)
    assert (heated.lr, heated.steps, heated.weight, heated.epochs) == (0.3, 2, "num_examples", None)
    assert (unheated.lr, hasattr(unheated, "weight"), hasattr(plain, "lr")) == (0.3, False, False)
    assert pickle.loads(pickle.dumps((heated, plan[0].config.algorithm))) == (heated, plan[0].config.algorithm)
    assert sweep.left_out(plan) == [
        f"left out algorithm.correction: {HERE}heated has no such option",
        f"left out algorithm.correction: {HERE}unheated has no such option",
        f"left out algorithm.steps, algorithm.lr and algorithm.correction: {HERE}plain has no such option",
    ]
    back = fedfleet.load(plan[0].config, {"algorithm": "fedavg"}).algorithm
    assert (back.lr, back.steps, back.correction.kind) == (0.3, 2, "fedau")


WRONG = [
    ({"algorithm.lr": 0}, "algorithm.lr=0: input should be greater than 0"),
    ({"algorithm.lr": "0.1"}, "algorithm.lr='0.1': input should be a valid number"),
    ({"algorithm.heat": -1.0}, "algorithm.heat=-1.0: input should be greater than 0"),
    ({"algorithm.epochs": 1}, "^algorithm: give steps or epochs, not both"),
    ({"algorithm.lr_schedule": {"kind": "cosine", "rounds": 2}}, "algorithm.lr_schedule … the run has rounds=3"),
    ({"algorithm.heatt": 1.0}, "^algorithm.heatt=1.0: unknown key; did you mean algorithm.heat?"),
    ({"algorithm.batch_size": 2000}, "^algorithm.batch_size=2000: the largest client has"),
    ({"algorithm.dual_lr": 0.1}, "^algorithm.dual_lr=0.1: task.name='classification' has no dual part"),
    ({"algorithm.correction": "mifa"}, "^algorithm.correction= … which has no option … derive Heat from FedAvgOptions"),
    ({"algorithm.arguments.options": {}}, "^algorithm.arguments.options: heated takes its options at keys such as algorithm.lr"),
    ({"algorithm.arguments.heat": 2.0}, "^algorithm.arguments.heat=2.0: heated takes no such argument: there is"),
    ({"algorithm": {"name": f"{HERE}unheated", "weight": "uniform"}}, "no option … take AveragingOptions"),
    ({"algorithm": {"name": f"{HERE}plain", "lr": 0.2}}, "^algorithm.lr=0.2: plain takes it … write algorithm.arguments.lr"),
    ({"algorithm": {"name": f"{HERE}plain", "steps": 2}}, "^algorithm.steps=2: plain takes no options: leave it out"),
    ({"algorithm": f"{HERE}lacking"}, "lacking: its parameter options is annotated 'Heated', which its module does not have"),
    ({"algorithm": f"{HERE}forgotten"}, "forgotten': it returns None"),
    ({"algorithm": f"{HERE}unsaid"}, "unsaid: its parameter options has no annotation"),
    ({"algorithm": f"{HERE}clashing"}, "Sourced has an option 'source', a key of algorithm: call it otherwise"),
]  # fmt: skip


def test_what_will_not_do_is_refused(subtests):
    base = {k: v for k, v in CONFIG.items() if k != "algorithm"}
    all_say(subtests, lambda o: fedfleet.Experiment(fedfleet.load(base if "algorithm" in o else CONFIG, o)), WRONG)


def test_a_search_reaches_them(subtests):
    def prepared(lr: str) -> search.Search:
        wanted = {"search": {"algorithm.lr": lr, "algorithm.heat": [1.0, 2.0]}, "metric": "eval/accuracy", "trials": 2}
        return search.prepare(fedfleet.load({**CONFIG, "tune": wanted}), Progress.silent())

    assert prepared("loguniform(0.1, 1)").trial(0, {"algorithm.lr": 0.2}, 0).algorithm.lr == 0.2
    all_say(subtests, prepared, [("uniform(-1, 1)", "algorithm.lr=-1.0: input should be greater than 0")])
