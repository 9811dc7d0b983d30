"""Distributions as they are written, what is drawn from them, and what is refused."""

from __future__ import annotations

import math

import pytest

import fedfleet
from fedfleet.config.schema import load
from fedfleet.config.search import Choice, Range, searched, space
from fedfleet.config.tuning import Tuning, goal, rungs
from fedfleet.report.meanings import measured_on
from tests.refusals import all_refused, refused


def read(text):
    return space({"algorithm.lr": text})["algorithm.lr"]


@pytest.mark.parametrize(("text", "quantiles", "values"), [
    ("uniform(1, 3)", [0, 0.25, 0.5], [1.0, 1.5, 2.0]),
    ("loguniform(1e-3, 1)", [0, 1 / 3, 2 / 3], [1e-3, 1e-2, 1e-1]),
    ("quniform(0, 1, 0.25)", [0, 0.19, 0.21, 0.99], [0.0, 0.0, 0.25, 1.0]),
    ("quniform(2, 10, 4)", [0, 0.4, 0.99], [2, 6, 10]), ("quniform(0, 1, 0.4)", [0.99], [0.8]),
    ("randint(1, 3)", [0, 0.34, 0.67, 0.999], [1, 2, 3, 3]),
    ("lograndint(1, 7)", [0, 0.3, 0.34, 0.999], [1, 1, 2, 7]),
    ("choice(1, null, fedavg, [8, 4])", [0, 0.25, 0.5, 0.99], [1, None, "fedavg", [8, 4]]),
    ([0.1, 10], [0, 0.5], [0.1, 10]),
])  # fmt: skip
def test_what_a_quantile_is(text, quantiles, values):
    found = [read(text).at(u) for u in quantiles]
    assert found == pytest.approx(values) if isinstance(values[0], float) else found == values
    assert [type(v) for v in found] == [type(v) for v in values]


def test_ends_are_kept():
    for text in ("uniform(1, 3)", "loguniform(0.001, 1)", "lograndint(1, 1000)", "randint(1, 3)"):
        d = read(text)
        assert isinstance(d, Range)
        assert d.low <= d.at(0.0) == pytest.approx(d.low)
        assert d.at(math.nextafter(1, 0)) <= d.high
        assert d.probes()[-1] == d.high
    assert isinstance(read("choice(1)"), Choice)


MISTAKES = [
    "loguniform(0, 1)", "lograndint(0, 3)", "uniform(1, 1)", "uniform(1)", "uniform(a, b)", "uniform(0, .inf)", "choice()",
    "randint(1.5, 3)", "quniform(0, 1)", "quniform(0, 1, 2)", "quniform(0, 1, 0)", [1, 2, 1], "choice(1, [)", "0.1", 0.1,
]  # fmt: skip
ELSEWHERE = ["seed", "rounds", "executor.actors", "vary.algorithm.lr", "max_seconds", "evaluation.every"]


def test_what_is_no_distribution_and_what_cannot_be_searched(subtests):
    all_refused(subtests, read, [(text, f"tune.search.algorithm.lr={text!r}") for text in MISTAKES])
    misspelt = "tune.search.algorithm.lr='logunifrom': unknown; did you mean 'loguniform'"
    refused(lambda: read("logunifrom(1, 2)"), misspelt)
    all_refused(subtests, lambda key: space({key: [1, 2]}), [(key, f"tune.search.{key}") for key in ELSEWHERE])
    for text in ("algorithm.lr", "=choice(1)", "algorithm.lr=", "a..b=choice(1)"):
        with pytest.raises(fedfleet.ConfigError):
            searched(text)


def test_dotted_keys_of_a_search_stay_whole():
    raw = {"tune": {"search": {"algorithm.lr": [0.1, 0.2]}, "metric": "eval/loss"}}
    config = load(raw, ["tune.search.algorithm.steps=randint(1, 5)", "tune.trials=3"])
    assert config.tune is not None
    assert config.tune.search == {"algorithm.lr": [0.1, 0.2], "algorithm.steps": "randint(1, 5)"}
    assert searched("algorithm.lr = uniform(0, 1)") == {"algorithm.lr": "uniform(0, 1)"}


def tuning(**given) -> Tuning:
    return Tuning(**{"search": {"algorithm.lr": [1]}, "metric": "eval/accuracy", **given})


@pytest.mark.parametrize(("given", "rounds", "after"), [
    ({}, 27, [1, 3, 9, 27]), ({}, 100, [4, 12, 36, 100]), ({}, 5, [1, 5]), ({}, 1, [1]),
    ({"min_rounds": 33}, 100, [33, 100]), ({"min_rounds": 10, "reduction": 2}, 80, [10, 20, 40, 80]),
    ({"min_rounds": 7}, 7, [7]), ({"scheduler": "none"}, 27, [27]),
])  # fmt: skip
def test_rungs(given, rounds, after):
    assert rungs(tuning(**given), rounds) == after


def test_which_way_a_metric_is_better_and_of_which_examples_it_is():
    names = {"eval/accuracy": "max", "eval/validation_loss": "min", "eval/auc": "max", "eval/accuracy_std": "min"}
    assert {name: goal(tuning(metric=name)) for name in names} == names
    assert goal(tuning(metric="eval/strange", goal="min")) == "min"
    with pytest.raises(fedfleet.ConfigError, match="give max or min"):
        goal(tuning(metric="eval/strange"))
    assert measured_on("eval/accuracy", 0.0) == measured_on("eval/target_accuracy", 0.0) == "test examples"
    assert measured_on("eval/validation_accuracy", 0.0).startswith("validation")
    assert measured_on("eval/train_loss", 0.0) == "training examples"
    assert measured_on("eval/clients_accuracy", 0.2) == "examples held out of each client's"
    assert measured_on("eval/own_accuracy", 0.0) == "the clients' training examples"
