"""Searches for each label of ``compare`` at each point of ``vary``: what is written, gone on with, left out and refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console

import fedfleet
from fedfleet.commands import tune
from fedfleet.config.schema import load
from fedfleet.config.search import space
from fedfleet.experiments import campaign, runner
from fedfleet.experiments.progress import Progress
from fedfleet.tuning import several, winners
from tests.refusals import all_refused, refused

ROOT = Path(__file__).resolve().parents[3]
SILENT = Progress.silent()
PROX = {"algorithm": {"name": "fedprox", "mu": 0.5}, "tune.search.algorithm.steps": [1, 2, 3]}
TINY: dict[str, Any] = {
    "rounds": 3,
    "population": {"dataset": {"name": "synthetic", "features": 5, "classes": 3, "examples": 10}, "clients": 6},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "fedavg", "lr": 0.1, "steps": 2, "batch_size": 4},
    "cohort": {"size": 3}, "availability": {"kind": "bernoulli", "rate": 1.0},
    "executor": {"kind": "local"}, "evaluation": {"every": 1},
    "compare": {
        "FedAvg": {},
        "Prox": PROX,
    },
    "vary": {"availability.rate": [1.0, 0.7]},
    "tune": {
        "search": {"algorithm.lr": "loguniform(1e-3, 3)", "algorithm.mu": [0.1, 1.0]}, "metric": "eval/loss", "trials": 3,
    },
}  # fmt: skip
PLACES = ("FedAvg-rate-1.0", "FedAvg-rate-0.7", "Prox-rate-1.0", "Prox-rate-0.7")


def prepared(**given: Any) -> several.Searches:
    return several.prepare(load(TINY, given), SILENT)


def tuned(out: Path, searches: several.Searches, jobs: int = 1) -> None:
    tune.run(searches, out, SILENT, Console(quiet=True), jobs)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("several") / "tuned"
    tuned(out, prepared())
    return out


def journals(out: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in sorted(out.glob("*/journal.jsonl"))}


@pytest.mark.slow
def test_the_winners_are_written_and_run_as_they_are(done: Path, tmp_path: Path):
    given = yaml.safe_load((done / "best.yaml").read_text())
    assert {*given} & {"tune", "vary"} == set()
    assert [*given["compare"]] == ["FedAvg rate=1.0", "FedAvg rate=0.7", "Prox rate=1.0", "Prox rate=0.7"]
    assert "algorithm.mu" not in given["compare"]["FedAvg rate=0.7"], "it was given to all, and FedAvg has none"
    assert {"algorithm.name", "algorithm.mu", "algorithm.steps"} <= {*given["compare"]["Prox rate=0.7"]}
    table = pd.read_parquet(done / "winners.parquet")
    assert table["folder"].tolist() == [*PLACES]
    for run, place, value in zip(
        campaign.run(load(done / "best.yaml"), tmp_path / "best", SILENT, report=False),
        PLACES,
        table["value"],
        strict=True,
    ):
        trials = pd.read_parquet(done / place / "trials.parquet")
        mine = (
            done / place / "trials" / f"{trials['value'].where(trials['state'] == 'complete').idxmin():03}" / "seed-0"
        )
        assert (run.folder / "model.safetensors").read_bytes() == (mine / "model.safetensors").read_bytes()
        assert run.summary["final"]["eval/loss"] == value
        config, other = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run.folder, mine))
        assert {**config, "label": None} == {**other, "label": None}


@pytest.mark.slow
def test_each_folder_is_that_of_a_search_alone(done: Path, tmp_path: Path):
    """Also in the number and values of its trials: the budget is a search's own, and draws of one number are alike."""
    place = PLACES[3]
    alone = several.prepare(load(done / place / "tune.yaml"), SILENT)
    assert not alone.several
    tuned(tmp_path / "alone", alone)
    for name in ("journal.jsonl", "best.yaml", "tune.yaml"):
        assert (tmp_path / "alone" / name).read_bytes() == (done / place / name).read_bytes(), name
    events = {name: [json.loads(line) for line in text.splitlines()] for name, text in journals(done).items()}
    drawn = {name: [e["values"]["algorithm.lr"] for e in each if "values" in e] for name, each in events.items()}
    assert {name: len(each) for name, each in drawn.items()} == dict.fromkeys(PLACES, 3)
    assert len({tuple(each) for each in drawn.values()}) == 1


def test_the_report_and_the_terminal_have_a_row_for_each(done: Path, capsys: pytest.CaptureFixture[str]):
    page = re.sub(r"<[^>]+>", " ", (done / "report.html").read_text())
    row = pd.read_parquet(done / "winners.parquet").set_index("folder").loc[PLACES[2]]
    for text in (
        "Prox rate=1.0",
        f"{row['value']:.4g}",
        "Left out tune.search.algorithm.mu: fedavg",
        "By label and point",
    ):
        assert text in page
    assert page.count("chosen on the test examples") == 1


@pytest.mark.slow
def test_an_interrupted_one_goes_on(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any):
    """It stops in its second search, and `fedfleet resume` ends it as if it had not."""
    play, left = runner.play, [6]

    def interrupted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return play(*args)

    monkeypatch.setattr(runner, "play", interrupted)
    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        tuned(out, prepared())
    assert (out / PLACES[0] / "best.yaml").exists()
    before = journals(out)
    assert before[PLACES[0]] == journals(done)[PLACES[0]]
    assert len(before[PLACES[1]]) < len(journals(done)[PLACES[1]])
    refused(
        lambda: tuned(out, prepared(**{"tune.metric": "eval/accuracy"})), "tune.metric='eval/accuracy': the search in"
    )
    refused(lambda: tuned(out, prepared(compare={"Prox": PROX})), "compare or vary: 'FedAvg rate=1.0' is searched in")
    alone = {"compare": None, "vary": None, "tune.search": {"algorithm.lr": [0.1, 1.0]}}
    refused(lambda: tuned(out, prepared(**alone)), "compare")
    other = {"compare.Prox.algorithm.mu": 0.1, "compare.Prox.algorithm.batch_size": 2}
    refused(lambda: tuned(out, prepared(**other)), "algorithm.batch_size=2: the search in")
    assert command("resume", out)[0] == 0
    assert journals(out) == journals(done)
    assert (out / "best.yaml").read_text() == (done / "best.yaml").read_text()
    pd.testing.assert_frame_equal(*(pd.read_parquet(f / "winners.parquet") for f in (out, done)), check_exact=True)


@pytest.mark.slow
def test_a_search_without_a_winner_is_named_and_the_others_are_kept(tmp_path: Path):
    given = {
        "compare.FedAvg": {"tune.search": {"algorithm.lr": [1e38, 2e38]}},
        "vary": None,
        "tune.trials": 2,
        "rounds": 2,
    }
    with pytest.raises(fedfleet.FedfleetError, match=r"^1 of 2 searches: FedAvg: all 2 trials failed"):
        tuned(tmp_path / "out", prepared(**given))
    assert [*yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())["compare"]] == ["Prox"]
    assert pd.read_parquet(tmp_path / "out" / "winners.parquet")["error"].notna().tolist() == [True, False]
    assert "1 failed" in (tmp_path / "out" / "report.html").read_text()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"compare.Prox.tune.trials": 9}, "compare.Prox.tune.trials=9: not here"),
    ({"compare.Prox.tune": None}, "compare.Prox.tune=None: not here"),
    ({"vary": {"tune.trials": [1, 2]}}, "vary.tune.trials=[1, 2]: not here"),
    ({"vary": {"seed": [1, 2]}}, "vary.seed=[1, 2]: not here"),
    ({"tune.search.availability.rate": [0.1, 0.2]}, "vary.availability.rate=[1.0, 0.7]: tune.search.availability.rate"),
    ({"vary": {"availability": [{"kind": "bernoulli", "rate": 0.5}]}, "tune.search.availability.rate": [1]}, "vary.avail"),
    ({"tune.search.algorithm.name": ["fedavg", "fedprox"]}, "compare.Prox.algorithm.name='fedprox': tune.search"),
    ({"tune.search.algorithm.lrr": [0.1]}, "tune.search.algorithm.lrr: algorithm.lrr=0.1: unknown key; did you mean algorithm.lr"),
    ({"compare.FedAvg": {"tune.search.algorithm.mu": [1]}},
     "run 'FedAvg rate=1.0': tune.search.algorithm.mu: algorithm.mu=1: unknown key"),
    ({"compare.Prox": {"tune.search.algorithm.lr": [-1]}}, "run 'Prox rate=1.0': tune.search.algorithm.lr: algorithm.lr=-1"),
    ({"compare.FedAvg": {"tune.search": {}}}, "run 'FedAvg rate=1.0': tune.search: not given"),
    ({"tune": {"search": {"algorithm.mu": [1, 2]}}}, "run 'FedAvg rate=1.0': tune.search.algorithm.mu: it has no such"),
    ({"compare": {"best.yaml": {}}, "vary": None}, "compare or vary: 'best.yaml': a file of the search"),
    ({"tune.metric": "eval/acuracy"}, "run 'FedAvg rate=1.0': tune.metric='eval/acuracy': unknown"),
    ({"max_seconds": 3}, "run 'FedAvg rate=1.0': max_seconds=3"),
]  # fmt: skip


def test_what_cannot_be_is_refused_before_a_trial(subtests: pytest.Subtests):
    all_refused(subtests, lambda given: prepared(**given), REFUSED)


def test_data_are_loaded_once_and_what_is_run_is_told(monkeypatch: pytest.MonkeyPatch):
    times, read = [0], campaign.load_data

    def counted(config: Any) -> Any:
        times[0] += 1
        return read(config)

    monkeypatch.setattr(campaign, "load_data", counted)
    lines = tune.describe(prepared()).splitlines()
    assert times == [1]
    assert [line.split(": 3 trials of random, sha")[0] for line in lines] == [
        "FedAvg rate=1.0", "FedAvg rate=0.7", "Prox rate=1.0", "Prox rate=0.7",
    ]  # fmt: skip
    plain = fedfleet.load(TINY, {"tune": None})
    assert len(campaign.planned(plain)) == 4, "without tune a label's distributions mean nothing"


def test_what_a_winner_has_not_of_what_all_share_is_its_default():
    power = {"name": "fedprox", "mu": 0.2, "lr": 0.1, "lr_schedule": {"kind": "power", "exponent": 0.3}}
    top = load(TINY, {"algorithm": power, "compare": None, "vary": None, "tune": None})
    config = load({**TINY, "algorithm": {**TINY["algorithm"], **power}})
    best = load({**TINY, "algorithm": {"name": "fedprox", "lr": 1.0, "lr_schedule": "constant"}, "tune": None})
    entry = winners._entry(config, top, prepared().cells[0].point, best)
    assert load(top, entry).algorithm == best.algorithm
    assert entry["algorithm.lr_schedule.exponent"] is None


def test_what_is_at_an_edge(subtests: pytest.Subtests):
    rows: list[tuple[str, Any, Any, str | None]] = [
        ("lr", [0.1, 1.0, 10.0], 0.1, "below 0.1"), ("lr", [10.0, 1.0, 0.1], 10.0, "above 10"),
        ("lr", [0.1, 1.0, 10.0], 1.0, None), ("lr", [0.1], 0.1, None), ("steps", [1, 2], 1, None), ("steps", [1, 2], 2, "above 2"),
        ("lr", "loguniform(0.01, 1)", 0.0105, "below 0.01"), ("lr", "loguniform(0.01, 1)", 0.02, None),
        ("lr", "uniform(0.01, 1)", 0.02, "below 0.01"), ("lr", "quniform(1, 2, 0.5)", 2.0, "above 2"),
        ("lr", "quniform(1, 2, 0.5)", 1.5, None), ("steps", "randint(2, 40)", 2, "below 2"), ("steps", "randint(2, 40)", 3, None),
        ("client_optimizer.momentum", [0.0, 0.9], 0.0, None), ("client_optimizer.momentum", [0.0, 0.9], 0.9, "above 0.9"),
        ("weight", ["uniform", "num_examples"], "uniform", None),
    ]  # fmt: skip
    search = prepared().cells[0].search
    for option, values, value, edge in rows:
        key = f"algorithm.{option}"
        with subtests.test(f"{values} {value}"):
            assert winners.edges(replace(search, space=space({key: values})), {key: value}).get(key) == edge


def test_the_documentation_shows_the_configuration_that_comes_with_it():
    text = (ROOT / "docs" / "guides" / "tuning.md").read_text(encoding="utf-8")
    shown = [block for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S) if "compare:" in block]
    assert [load(yaml.safe_load(block)) for block in shown] == [load(ROOT / "configs" / "tuning_dropout.yaml")]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.own_ray
def test_side_by_side_they_find_the_same(done: Path, tmp_path: Path):
    tuned(tmp_path / "two", prepared(), jobs=2)
    assert (tmp_path / "two" / "best.yaml").read_text() == (done / "best.yaml").read_text()
    assert {place: sorted(text.splitlines()) for place, text in journals(tmp_path / "two").items()} == {
        place: sorted(text.splitlines()) for place, text in journals(done).items()
    }
