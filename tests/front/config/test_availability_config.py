"""Availability from the configuration to the run folder, and what is refused at plan time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import fedfleet
from fedfleet.config.schema import load
from fedfleet.datasets.convert import convert
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.errors import FedfleetError
from tests.front.commands.lines import all_told
from tests.parts import slow_but
from tests.refusals import refused

QUICK: dict[str, Any] = {
    "rounds": 3, "population": {"dataset": "digits", "clients": 40, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "task": {"model": "logistic"}, "algorithm": {"name": "fedavg", "steps": 1, "batch_size": 4},
    "cohort": {"size": 12}, "executor": {"kind": "local"},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "random_rate": {"low": 0.3, "high": 0.9}, "markov": {"mean_on_s": 5.0, "mean_off_s": 5.0},
    "diurnal": {"zones": [-8, 0, 5.5], "day_s": 20.0}, "label_correlated": {"rate": 0.6, "strength": 3.0},
    "size_correlated": {"rate": 0.6, "strength": -3.0}, "trace": {}, "independent": {"rates": "mifa"},
    "markov_rounds": {"rates": {"kind": "fedau", "mean": 0.5}}, "cyclic": {"rates": "beta", "cycle": 5},
    "sine": {"rates": "fedawe"}, "staircase": {"rates": "uniform", "rounds": 2},
    "f3ast": {"rates": {"kind": "constant", "rate": 0.9}}, "outages": {"up": 0.6},
    "blocks": {"groups": 2, "rounds": 1}, "alternating": {"rounds": 2, "ratio": 0.5},
}  # fmt: skip


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.parquet"
    starts = [0.2 * i for i in range(30)]
    rows = {"client": list(range(30)), "start_s": starts, "end_s": [start + 4 for start in starts]}
    pq.write_table(pa.table(rows), path)
    return path


@pytest.mark.parametrize(
    "kind", slow_but(KINDS, "markov", "label_correlated", "trace", "independent", "outages", "blocks")
)
def test_a_run_with_every_kind(tmp_path, trace, kind):
    options = {"path": str(trace)} if kind == "trace" else KINDS[kind]
    config = {**QUICK, "availability": {"kind": kind, **options}}
    if kind == "outages":
        config["domains"] = {"kind": "label"}
    run = fedfleet.run(config, out=tmp_path / "run")
    outcomes = run.table("outcomes").outcome.value_counts()
    assert outcomes["unavailable"] > 0
    assert outcomes["completed"] > 0
    in_time = {"markov", "diurnal", "trace"}
    assert ("failed" in outcomes) <= (
        kind in in_time
    )  # who draws afresh in every phase or round is not lost within one
    again = fedfleet.run(run.folder / "config.yaml", out=tmp_path / "again")
    pd.testing.assert_frame_equal(again.table("outcomes"), run.table("outcomes"))
    if kind == "alternating":  # the same of any seed
        return
    other = fedfleet.run(config, {"seed": 1}, out=tmp_path / "other")
    assert not other.table("outcomes").equals(run.table("outcomes"))


@pytest.mark.parametrize("kind", ["label_correlated", "size_correlated"])
def test_clients_on_disk_and_synthetic_clients(tmp_path, kind):
    owners = [i for i in range(30) for _ in range(1 + i % 4)]
    rows = {"client": owners, "y": [i % 3 for i in owners], "f": [float(i) for i in owners]}
    pq.write_table(pa.table(rows), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "clients", hold_out=0.1)
    datasets = {
        "disk": {"dataset": {"name": "disk", "path": str(tmp_path / "clients")}},
        "synthetic": {"dataset": {"name": "synthetic", "features": 2, "examples": [1, 4]}, "clients": 10**10},
    }
    for name, population in datasets.items():
        changed = {"population": population, "algorithm": {"name": "fedavg", "batch_size": 1}}
        changed |= {"availability": {"kind": kind, "rate": 0.5, "strength": 3}}
        run = fedfleet.run({**QUICK, **changed}, out=tmp_path / name)
        assert run.table("outcomes").outcome.nunique() == 2


def test_defaults_are_written_out():
    written = load({"availability": "diurnal"}).model_dump(mode="json")["availability"]
    shape = {"mean": 0.5, "amplitude": 0.3, "peak_hour": 2.0, "zones": None, "day_s": 86400.0}
    assert written == {"kind": "diurnal", **shape}
    redrawn = load({"availability": "random_rate"}).model_dump(mode="json")["availability"]
    assert redrawn == {"kind": "random_rate", "low": 0.5, "high": 1}


def test_a_dropout_study_compares_rates_that_are_equal():
    """Correlated with the labels or not, as many clients drop out."""
    rates = []
    for kind in ("bernoulli", "label_correlated"):
        config = load(QUICK, {"availability": {"kind": kind, "rate": 0.3}})
        model: Any = Experiment(config).federation.availability
        rates.append(model.rate if kind == "bernoulli" else float(model.rate(torch.arange(40)).mean()))
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)


REFUSED = [
    ("random_rate, low: 0.9, high: 0.5", ": low=0.9"), ("random_rate, high: 0", ".high=0"),
    ("markov", ".mean_on_s: missing"), ("markov, mean_on_s: 0, mean_off_s: 1", ".mean_on_s=0"),
    ("diurnal, mean: -0.4, amplitude: 0.4", ": mean=-0.4 and amplitude=0.4"),
    ("diurnal, mean: 0, amplitude: 0", ": mean=0 and amplitude=0"), ("diurnal, amplitude: -1", ".amplitude=-1"),
    ("diurnal, zones: []", ".zones=[]"), ("diurnal, zones: [30]", ".zones.0=30"),
    ("label_correlated, rate: 0", ".rate=0"), ("label_correlated, classes: [3, 10]", ".classes=[3, 10]"),
    ("size_correlated, classes: [3]", ".classes=[3]: unknown key"), ("size_correlated, strength: 99", ".strength=99"),
    ("independent, rates: sometimes", ".rates='sometimes'"), ("cyclic, rates: {kind: fedau, low: 0.3}", ".rates={"),
    ("sine, rates: {kind: uniform, low: 0.9, high: 0.5}", ".rates={"),
    ("sine, rates: {rate: 0.2}, below: 0.3", ": below=0.3"),
    ("markov_rounds, off_to_on: 0.7", ".off_to_on=0.7"), ("f3ast, level: 0.3", ": level=0.3"), ("outages", ".kind='outages'"),
    ("blocks, groups: 21", ".groups=21"), ("outages, up: [0.5, 0]", ": up=[0.5, 0.0]"), ("staircase, low: 2", ".low=2"),
    ("trace", ".path: missing"), ("trace, path: {trace}, map: mod", ".map='mod'"),
    ("trace, path: {trace}, horizon_s: 3", ".horizon_s=3: an interval ends at 9.8 s ({trace}: row 29)"),
    ("trace, path: nowhere.parquet", "nowhere.parquet"), ("trace, path: {trace}, map: direct", "{trace}: row 20"),
]  # fmt: skip


def test_refused_at_plan_time(subtests, command, tmp_path, trace):
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(QUICK))

    def call(given: str) -> tuple[int, str, str]:
        overrides = ["population.clients=20", f"availability={{kind: {given.replace('{trace}', str(trace))}}}"]
        told = command("plan", path, *overrides)
        assert command("run", path, *overrides, "--out", out)[::2] == told[::2]
        assert not out.exists()
        return told

    rows = [
        (given, f"{'availability' * (key[0] in '.:')}{key}".replace("{trace}", str(trace))) for given, key in REFUSED
    ]
    all_told(subtests, call, rows)


@pytest.mark.parametrize(("cohort", "key"), [
    ({"wait_for": 31, "size": 40}, "cohort.wait_for=31"),
    ({"min_responses": 31, "size": 40}, "cohort.min_responses=31"),
    ({"over_select": 1.25, "size": 32}, "cohort.size=32"),
    ({"wait_for": "siwer", "response_low": 0.8, "size": 40}, "cohort.wait_for='siwer', at least 33 answers"),
])  # fmt: skip
def test_more_answers_than_clients_that_are_ever_online_are_refused(trace, cohort, key):
    given = {"availability": {"kind": "trace", "path": str(trace), "map": "direct"}}
    enough = {k: 30 if v in (31, 32) else 0.6 if k == "response_low" else v for k, v in cohort.items()}
    Experiment(load({**QUICK, **given, "cohort": enough}))
    assert "only 30 clients" in refused(lambda: Experiment(load({**QUICK, **given, "cohort": cohort})), key)
    Experiment(load({**QUICK, "availability": {**given["availability"], "map": "seeded"}, "cohort": cohort}))


def test_a_trace_of_fedscale_from_the_command_line(command, tmp_path):
    source, out = tmp_path / "trace.json", tmp_path / "trace.parquet"
    source.write_text(json.dumps({"4": {"active": [0, 5], "inactive": [3, 5], "finish_time": 10, "model": "M"}}))
    status, told, _ = command("trace", source, out)
    assert status == 0
    assert told == (
        f"{out}: 1 clients, 1 intervals; left out: 1 intervals without a length, 0 clients that are never active\n"
    )
    assert pd.read_parquet(out).to_dict("list") == {"client": [4], "start_s": [0], "end_s": [3], "period_s": [10]}
    config = {**QUICK, "rounds": 10, "availability": {"kind": "trace", "path": str(out)}}
    with pytest.raises(FedfleetError, match=r"0 of 12 invited answered.*or, .*, cohort\.retry_s$"):
        fedfleet.run(
            config, {"cohort.retry_s": 0}, out=tmp_path / "hasty"
        )  # all are offline together, and no time passes between cohorts
    phases = fedfleet.run(config, {"cohort.retry_s": 1.5}, out=tmp_path / "run").table("phases")
    assert (phases.attempt > 0).any()
    status, _, error = command("trace", source, out)
    assert (status, error) == (2, f"error: {out}: exists: choose another file, or remove it first\n")
