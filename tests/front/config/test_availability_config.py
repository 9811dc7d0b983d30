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
from fedfleet.config.schema import complete, load
from fedfleet.datasets.convert import convert
from fedfleet.experiments.experiment import Experiment
from fedfleet.simulator.errors import FedfleetError

QUICK: dict[str, Any] = {
    "rounds": 3,
    "population": {"dataset": "digits", "clients": 40, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "task": {"model": "logistic"},
    "algorithm": {"name": "fedavg", "steps": 1, "batch_size": 4},
    "cohort": {"invite": 12},
    "executor": {"kind": "local"},
}
KINDS: dict[str, dict[str, Any]] = {
    "random_rate": {"low": 0.3, "high": 0.9},
    "markov": {"mean_on_s": 5.0, "mean_off_s": 5.0},
    "diurnal": {"zones": [-8, 0, 5.5], "day_s": 20.0},
    "label_correlated": {"rate": 0.6, "strength": 3.0},
    "size_correlated": {"rate": 0.6, "strength": -3.0},
    "trace": {},
}


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.parquet"
    rows = {
        "client": list(range(30)),
        "start_s": [0.2 * i for i in range(30)],
        "end_s": [0.2 * i + 4 for i in range(30)],
    }
    pq.write_table(pa.table(rows), path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_every_kind(tmp_path, trace, kind):
    options = {"path": str(trace)} if kind == "trace" else KINDS[kind]
    config = {**QUICK, "availability": {"kind": kind, **options}}
    run = fedfleet.run(config, out=tmp_path / "run")
    fates = run.table("fates").fate.value_counts()
    assert fates["offline"] > 0
    assert fates["heard"] > 0
    redrawn = {"random_rate", "label_correlated", "size_correlated"}
    assert ("failed" in fates) <= (
        kind not in redrawn
    )  # who draws afresh in every phase is not lost in the middle of one
    again = fedfleet.run(run.folder / "config.yaml", out=tmp_path / "again")
    pd.testing.assert_frame_equal(again.table("fates"), run.table("fates"))
    other = fedfleet.run(config, {"seed": 1}, out=tmp_path / "other")
    assert not other.table("fates").equals(run.table("fates"))


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
        availability = {"kind": kind, "rate": 0.5, "strength": 3}
        changed = {
            "population": population,
            "availability": availability,
            "algorithm": {"name": "fedavg", "batch_size": 1},
        }
        run = fedfleet.run({**QUICK, **changed}, out=tmp_path / name)
        assert run.table("fates").fate.nunique() == 2


def test_defaults_are_written_out():
    written = complete(load({"availability": "diurnal"}))["availability"]
    assert written == {
        "kind": "diurnal", "mean": 0.5, "amplitude": 0.3, "peak_hour": 2.0, "zones": None, "day_s": 86400.0
    }  # fmt: skip
    assert complete(load({"availability": "random_rate"}))["availability"] == {
        "kind": "random_rate",
        "low": 0.5,
        "high": 1,
    }


def test_a_dropout_study_compares_rates_that_are_equal():
    """Correlated with the labels or not, as many clients drop out."""
    rates = []
    for kind in ("bernoulli", "label_correlated"):
        config = load(QUICK, {"availability": {"kind": kind, "rate": 0.3}})
        model: Any = Experiment(config).federation.availability
        rates.append(model.rate if kind == "bernoulli" else float(model.chance(torch.arange(40)).mean()))
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("random_rate, low: 0.9, high: 0.5", "availability: low=0.9 is above high=0.5: lower it"),
        ("random_rate, high: 0", "availability.high=0: input should be greater than 0"),
        ("markov", "availability.mean_on_s: missing: give it"),
        (
            "markov, mean_on_s: 0, mean_off_s: 1",
            "availability.mean_on_s=0: input should be greater than or equal to 0.001",
        ),
        (
            "diurnal, mean: -0.4, amplitude: 0.4",
            "availability: mean=-0.4 and amplitude=0.4: nobody would ever be online: raise",
        ),
        ("diurnal, mean: 0, amplitude: 0", "availability: mean=0 and amplitude=0: nobody would ever be online: raise"),
        ("diurnal, amplitude: -1", "availability.amplitude=-1: input should be greater than or equal to 0"),
        ("diurnal, zones: []", "availability.zones=[]: list should have at least 1 item"),
        ("diurnal, zones: [30]", "availability.zones.0=30: input should be less than or equal to 24"),
        ("label_correlated, rate: 0", "availability.rate=0: input should be greater than 0"),
        (
            "label_correlated, classes: [3, 10]",
            "availability.classes=[3, 10]: no client holds class 10: leave it out (class numbers go up to 9)",
        ),
        ("size_correlated, classes: [3]", "availability.classes=[3]: unknown key"),
        ("size_correlated, strength: 99", "availability.strength=99: input should be less than or equal to 50"),
        ("trace", "availability.path: missing: give it"),
        ("trace, path: nowhere.parquet", "nowhere.parquet: there is no such file: give"),
        ("trace, path: {trace}, map: mod", "availability.map='mod': input should be 'seeded' or 'direct'"),
        (
            "trace, path: {trace}, horizon_s: 3",
            "availability.horizon_s=3: an interval ends at 9.8 s ({trace}: row 29): raise",
        ),
        ("trace, path: {trace}, map: direct", "{trace}: row 20: client 20 is none of 0 to 19: give client numbers"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "run"])
def test_refused_at_plan_time(command, tmp_path, trace, verb, given, says):
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(QUICK))
    overrides = ["population.clients=20", f"availability={{kind: {given.replace('{trace}', str(trace))}}}"]
    status, _, error = command(verb, path, *overrides, *(["--out", out] if verb == "run" else []))
    assert (status, error.count("\n")) == (2, 1), error
    assert error.startswith(f"error: {says.replace('{trace}', str(trace))}")
    assert not out.exists()


@pytest.mark.parametrize(
    ("cohort", "says"),
    [
        ({"respond": 31, "invite": 40}, "cohort.respond=31: only 30 clients have intervals in availability.path="),
        ({"min_responses": 31, "invite": 40}, "cohort.min_responses=31: only 30 clients have"),
        ({"over_select": 1.25, "invite": 32}, "cohort.invite=32: only 30 clients have"),
        (
            {"respond": "siwer", "response_low": 0.8, "invite": 40},
            "cohort.respond='siwer', at least 33 answers: only 30 clients have",
        ),
    ],
)
def test_more_answers_than_clients_that_are_ever_online_are_refused(trace, cohort, says):
    given = {"availability": {"kind": "trace", "path": str(trace), "map": "direct"}}
    enough = {k: 30 if v in (31, 32) else 0.6 if k == "response_low" else v for k, v in cohort.items()}
    Experiment(load({**QUICK, **given, "cohort": enough}))
    with pytest.raises(fedfleet.ConfigError) as caught:
        Experiment(load({**QUICK, **given, "cohort": cohort}))
    text = str(caught.value)
    assert text.startswith(says)
    assert text.endswith("and no other is ever online: lower it, or use availability.map=seeded")
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
