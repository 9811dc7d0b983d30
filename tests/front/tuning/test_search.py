"""Searches: what is resumed, what is kept, what is refused, and what is written of them."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console

import fedfleet
from fedfleet.commands import tune
from fedfleet.config import tuning
from fedfleet.config.schema import load
from fedfleet.config.tuning import Tuning
from fedfleet.experiments import runner
from fedfleet.experiments.progress import Progress
from fedfleet.report.words import quantity
from fedfleet.tuning import findings as findings
from fedfleet.tuning import search as searching
from fedfleet.tuning import searchers
from fedfleet.tuning.journal import JOURNAL, Journal
from fedfleet.tuning.schedules import Trial
from tests.refusals import all_refused, refused

SILENT = Progress.silent()
TINY: dict[str, Any] = {
    "rounds": 9,
    "population": {"dataset": {"name": "synthetic", "features": 5, "classes": 3, "examples": 10}, "clients": 6},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {
        "name": "fedopt", "lr": 0.1, "steps": 2, "batch_size": 4, "server_optimizer": {"name": "adam", "lr": 0.1},
    },
    "cohort": {"size": 3}, "executor": {"kind": "local"}, "evaluation": {"every": 2},
}  # fmt: skip
TUNE: dict[str, Any] = {
    "search": {"algorithm.lr": "loguniform(1e-3, 3)", "algorithm.steps": [1, 2, 4]},
    "metric": "eval/loss",
    "trials": 6,
}


def prepared(**given: Any) -> searching.Search:
    top = ("rounds", "max_seconds", "compare")
    said = {key: value for key, value in given.items() if "." in key or key in top}
    tune = {**TUNE, **{key: value for key, value in given.items() if key not in said}}
    tune = {key: value for key, value in tune.items() if value is not None}
    return searching.prepare(load({**TINY, "tune": tune}, said), SILENT)


def tuned(out: Path, jobs: int = 1, **given: Any) -> findings.Findings:
    search = prepared(**given)
    return findings.write(search, searching.run(search, out, SILENT, jobs), out)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, findings.Findings]:
    out = tmp_path_factory.mktemp("tuned") / "sha"
    return out, tuned(out)


def rounds(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "rounds.parquet").drop(columns="seconds")


def test_a_promoted_trial_is_the_run_that_was_never_paused(done, tmp_path):
    """It stood after 1 and 3 rounds, between evaluations; `best.yaml` runs, and gives its very bytes."""
    out, found = done
    assert found.rungs == [1, 3, 9]
    mine = searching.folder(out, found.winner, 0)
    alone = fedfleet.run(out / "best.yaml", out=tmp_path / "alone")
    for name in ("model.safetensors", "best.safetensors"):
        assert (mine / name).read_bytes() == (alone.folder / name).read_bytes()
    pd.testing.assert_frame_equal(rounds(mine), rounds(alone.folder), check_exact=True)
    paused, never = (yaml.safe_load((f / "config.yaml").read_text()) for f in (mine, alone.folder))
    assert {**paused, "label": None} == {**never, "label": None}
    summaries = [json.loads((f / "summary.json").read_text()) for f in (mine, alone.folder)]
    assert len({json.dumps([s[k] for k in ("status", "rounds", "final", "best", "bytes_up")]) for s in summaries}) == 1
    assert found.rows[found.winner]["value"] == alone.summary["final"]["eval/loss"]
    stopped = next(row for row in found.rows if row["state"] == "stopped")
    run = alone.folder.parent / "stopped"
    written = mine.parents[1] / f"{stopped['trial']:03}" / "seed-0" / "config.yaml"
    other = fedfleet.Experiment(fedfleet.load(written, {"rounds": stopped["rounds"]})).run(run)
    assert other.summary["final"]["eval/loss"] == stopped["value"]


def test_trials_are_tasks_of_the_cluster_that_is_named_and_train_in_their_process(monkeypatch, tmp_path):
    given = load(
        {**TINY, "tune": TUNE}, {"executor": {"kind": "auto", "address": "10.0.0.1:6379", "node_silence_s": 9}}
    )
    search, asked = searching.prepare(given, SILENT), []
    monkeypatch.setattr(searching, "run_jobs", lambda *told: asked.append(told[-1]) or iter(()))
    assert list(searching.run_all({tmp_path / "sha": search}, SILENT, 2)) == []
    assert asked == ["10.0.0.1:6379"]
    assert search.base.executor.kind == "local"


@pytest.mark.slow
def test_what_is_written_of_it(done):
    out, found = done
    table = pd.read_parquet(out / "trials.parquet")
    assert table["state"].tolist().count("complete") == 1
    assert sorted(table["rounds"]) == [1, 1, 1, 1, 3, 9]
    assert table["value"][found.winner] == table["after/9"].min()
    lowest = table.nsmallest(2, "after/1")["trial"]
    assert set(table[table["rounds"] > 1]["trial"]) == set(lowest), "of a loss the least goes on"
    assert found.cost["rounds"] == (16, 54)
    spent, whole = found.cost["bytes"]
    assert spent == table["bytes"].sum()
    assert whole == pytest.approx(spent / 16 * 54), "all rounds of all trials send alike here"
    for row in found.rows:
        one = json.loads((searching.folder(out, row["trial"], 0) / "summary.json").read_text())
        assert (one["rounds"], one["bytes_up"] + one["bytes_down"]) == (row["rounds"], row["bytes"])
    page = (out / "report.html").read_text()
    assert "chosen on the test examples" in page
    assert "stopped at rung 1" in page
    assert f"Trial {found.winner} won, with " in page
    assert f"Cost: 16 rounds and {quantity(spent, 'B')}; all" in page
    assert fedfleet.write_report([out], out / "compared").exists(), "its run folders are like any other"
    text = " ".join(findings.lines(found))
    assert "cost: 16 rounds" in text
    assert "eval/loss is of test examples" in text


@pytest.mark.slow
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    """With ASHA what is next depends on all that came before; a killed process may leave half a line."""
    given = {"scheduler": "asha", "trials": 5, "rounds": 3}
    whole = tuned(tmp_path / "whole", **given)
    play, left = runner.play, [3]

    def interrupted(*args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return play(*args)

    monkeypatch.setattr(runner, "play", interrupted)
    out, times = tmp_path / "cut", 0
    while True:
        try:
            found = tuned(out, **given)
            break
        except KeyboardInterrupt as e:
            times, left[0] = times + 1, 4
            (note,) = e.__notes__
            assert re.fullmatch(r"after \d of 5 trials were drawn", note)
            with (out / JOURNAL).open("a") as file:
                file.write('{"event": "mea')
    assert times > 1
    assert [{**r, "seconds": 0} for r in found.rows] == [{**r, "seconds": 0} for r in whole.rows]
    assert (out / JOURNAL).read_text() == (tmp_path / "whole" / JOURNAL).read_text()
    assert (out / "best.yaml").read_text() == (tmp_path / "whole" / "best.yaml").read_text()


@pytest.mark.slow
def test_more_trials_extend_a_search_and_another_is_refused(tmp_path, command):
    out = tmp_path / "more"
    given = {"scheduler": "none", "trials": 2, "rounds": 2, "evaluation.every": 1}
    first = tuned(out, **given)
    config = tmp_path / "tune.yaml"
    config.write_text((out / "tune.yaml").read_text())

    def called(*words: Any) -> tuple[int, str]:
        status, said, error = command(*words)
        return status, said + error

    assert called("resume", out, "tune.trials=3")[0] == 0
    table = pd.read_parquet(out / "trials.parquet")
    assert table["value"].tolist()[:2] == [row["value"] for row in first.rows]
    assert len(table) == 3
    other = ["--search", "algorithm.lr=uniform(0.1,1)"]
    for words, says in [
        (["--trials", 2], "tune.trials=2: the search in"),
        (["--trials", 3, "algorithm.batch_size=2"], "algorithm.batch_size=2: the search in"),
        (["--trials", 3, *other], "tune.search.algorithm.lr='uniform(0.1,1)'"),
    ]:
        status, text = called("tune", config, *words, "--out", out)
        assert (status, f"error: {says}" in text) == (2, True)
    assert called("run", config)[1].startswith("error: tune: a search")
    assert "3 trials of random, none" in called("tune", config, "--trials", 3, "--dry-run")[1]


@pytest.mark.slow
def test_failed_trials_are_shown_and_the_rest_goes_on(tmp_path):
    lr = {"algorithm.lr": [0.1, 1e38, 0.2]}
    found = tuned(tmp_path / "some", search=lr, searcher="grid", trials=None, rounds=3)
    assert [row["state"] for row in found.rows] == ["stopped", "failed", "complete"]
    assert "lower the learning rates" in found.rows[1]["error"]
    assert found.ranked()[-1]["trial"] == 1
    assert "1 failed" in (tmp_path / "some" / "report.html").read_text()
    found = tuned(tmp_path / "all", search={"algorithm.lr": [1e38]}, searcher="grid", trials=None, rounds=3)
    assert (found.failure or "").startswith("all 1 trials failed; trial 0: ")
    assert (tmp_path / "all" / "report.html").exists()
    together = {"algorithm.name": ["fedopt", "scaffold"], "algorithm.server_optimizer.lr": [0.05]}
    found = tuned(tmp_path / "together", search=together, searcher="grid", trials=None, rounds=1)
    assert found.winner == 0
    assert "algorithm.server_optimizer" in found.rows[1]["error"]


@pytest.mark.slow
def test_several_seeds_count_by_their_mean_and_the_best_evaluation_may_count(tmp_path):
    config = load({**TINY, "tune": {**TUNE, "scheduler": "none"}})
    search = searching.prepare(tune.configured(config, [], 2, {"trials": 2}), SILENT)
    found = findings.write(search, searching.run(search, tmp_path / "two", SILENT), tmp_path / "two")
    assert search.seeds == [0, 1]
    for row in found.rows:
        folders = [searching.folder(tmp_path / "two", row["trial"], seed) for seed in (0, 1)]
        values = [json.loads((one / "summary.json").read_text())["final"]["eval/loss"] for one in folders]
        assert len(set(values)) == 2
        assert row["value"] == statistics.fmean(values)
    tune.show(found, tmp_path / "two", Console(quiet=True))
    found = tuned(tmp_path / "best", of="best", trials=3, scheduler="none")
    for row in found.rows:
        summary = json.loads((searching.folder(tmp_path / "best", row["trial"], 0) / "summary.json").read_text())
        assert row["value"] == summary["best"]["eval/loss"]


SPACE = prepared().space


def told(scored, under_way: int = 0) -> list[Trial]:
    given = prepared(trials=40).given
    trials: list[Trial] = []
    for i in range(20):
        values = searchers.drawn(given.model_copy(update={"searcher": "random"}), SPACE, trials, [1, 3])
        trials.append(Trial(i, values, [] if i >= 20 - under_way else [scored(values)]))
    return trials


def test_tpe_looks_where_it_was_good_and_tells_trials_apart():
    given = prepared(searcher="tpe", trials=99).given
    for sign in (1, -1):
        trials = told(lambda v, sign=sign: sign * v["algorithm.lr"])
        found = []
        for _ in range(8):
            values = searchers.drawn(given, SPACE, trials, [1, 3])
            assert values == searchers.drawn(given, SPACE, trials, [1, 3])
            found.append(values["algorithm.lr"])
            trials.append(Trial(len(trials), values, [sign * values["algorithm.lr"]]))
        assert len(set(found)) == 8
        assert (statistics.median(found) > 1) == (sign == 1)
        assert (statistics.median(found) < 0.01) == (sign == -1)
    failed = told(lambda v: None if v["algorithm.lr"] > 0.1 else 1.0 - v["algorithm.lr"])
    assert searchers.drawn(given, SPACE, failed, [1, 3])["algorithm.lr"] < 0.1
    busy = told(lambda v: v["algorithm.lr"], under_way=5)
    assert searchers.drawn(given, SPACE, busy, [1, 3]) != searchers.drawn(given, SPACE, busy[:15], [1, 3])
    matters = searchers.importances(SPACE, told(lambda v: v["algorithm.lr"]))
    assert matters["algorithm.lr"] > 0.8
    assert sum(matters.values()) == pytest.approx(1)
    first = told(lambda v: 0.0)[:9]
    plain = given.model_copy(update={"searcher": "random"})
    assert searchers.drawn(given, SPACE, first, [1, 3]) == searchers.drawn(plain, SPACE, first, [1, 3])


REFUSED = [
    ({"metric": "eval/other"}, "tune.metric='eval/other': unknown"),
    ({"metric": "eval/acuracy", "goal": "max"}, "tune.metric='eval/acuracy': unknown; did you mean 'eval/accuracy'?"),
    ({"trials": None}, "tune.trials"), ({"searcher": "grid"}, "tune.search.algorithm.lr='loguniform(1e-3, 3)'"),
    ({"searcher": "grid", "search": {"algorithm.lr": [1, 2]}}, "tune.trials=6"),
    ({"scheduler": "none", "min_rounds": 1}, "tune.min_rounds=1"),
    ({"scheduler": "none", "reduction": 2}, "tune.reduction=2"),
    ({"min_rounds": 10}, "tune.min_rounds=10: there are 9 rounds"), ({"of": "best", "goal": "max"}, "tune.of='best'"),
    ({"search": {"algorithm.lrr": [1.0]}}, "tune.search.algorithm.lrr: algorithm.lrr=1.0: unknown key; did you mean algorithm.lr"),
    ({"search": {"algorithm.steps": "uniform(1, 5)"}}, "tune.search.algorithm.steps"), ({"max_seconds": 3}, "max_seconds=3"),
    ({"rounds": 0}, "rounds=0"), ({"search": {}}, "tune.search: not given"),
]  # fmt: skip


def test_a_search_that_was_damaged_or_cut_is_refused_and_a_line_cut_short_is_not(done, tmp_path):
    out = Path(shutil.copytree(done[0], tmp_path / "copy"))
    journal, mark, lines = (
        out / JOURNAL,
        out / searching.MARK,
        (done[0] / JOURNAL).read_text().splitlines(keepends=True),
    )
    score = next(i for i, line in enumerate(lines) if '"event": "measure"' in line)
    digit = lines[score].index('"score": ') + len('"score": -0.')
    other = str((int(lines[score][digit]) + 1) % 10)
    damaged = lines[score][:digit] + other + lines[score][digit + 1 :]
    for changed in (damaged, '{"event": "mea\n'):
        journal.write_text("".join([*lines[:score], changed, *lines[score + 1 :]]))
        refused(lambda: Journal(out), f"{journal}: line ")
    journal.write_text("".join(lines) + '{"event": "mea')
    assert [trial.scores for trial in Journal(out).trials] == [trial.scores for trial in Journal(done[0]).trials]
    assert journal.read_text() == "".join(lines)
    mark.write_text(mark.read_text().replace("rounds: 9", "rounds: 1"))
    refused(lambda: load(mark), f"{mark}: damaged or changed")
    mark.write_text(mark.read_text().rpartition("# sha256")[0])  # as whoever changes it is told to
    assert load(mark).rounds == 1
    next(out.glob("trials/*/seed-0/summary.json")).unlink()
    refused(lambda: findings.collect(prepared(), Journal(out).trials, out), f"{out}/trials/")


def test_what_is_better_has_to_be_said_of_a_metric_that_does_not_say_it():
    refused(lambda: tuning.check_measured(Tuning(metric="eval/odd"), ["eval/odd"]), "tune.goal: not given")
    tuning.check_measured(Tuning(metric="eval/odd", goal="max"), ["eval/odd"])


def test_what_cannot_be_is_refused_before_a_trial(subtests, tmp_path, monkeypatch):
    all_refused(subtests, lambda given: prepared(**given), REFUSED)
    (tmp_path / JOURNAL).write_text('{"event": "begin", "trial": 1, "rung": 0}\n')
    with pytest.raises(fedfleet.ConfigError, match="does not follow from what is above"):
        Journal(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(fedfleet.ConfigError, match=r"pip install 'fedfleet\[tune\]', or choose random"):
        prepared(searcher="tpe")
    assert searchers.importances(SPACE, told(lambda v: v["algorithm.lr"])) == {}
