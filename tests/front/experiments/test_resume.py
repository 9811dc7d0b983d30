"""A run that goes on is the run that never stopped: the same bytes, wherever and however it was ended."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pandas as pd
import pytest
import yaml

import fedfleet
from fedfleet.experiments import runfolder
from fedfleet.experiments.checkpoint import newest
from fedfleet.experiments.resume import run_or_go_on
from fedfleet.experiments.runfolder import locked
from fedfleet.experiments.runner import Runner
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.executors.local import LocalExecutor
from tests.front.experiments.resuming import BASE, CASES, KINDS, check_equal, config, outcome
from tests.parts import slow_but


@pytest.mark.parametrize("case", slow_but(CASES, *KINDS[:3]))
def test_interrupted_anywhere(tmp_path, undisturbed, monkeypatch, case):
    """Ctrl-C in the middle of a phase, of an evaluation, and again in the run that goes on."""
    out, calls, draw = tmp_path / "run", 0, random.Random(case)
    mapped, stops = LocalExecutor.map, [draw.randrange(1, 12) for _ in range(6)]

    def map_(self: LocalExecutor, *args: Any, **options: Any) -> Any:
        nonlocal calls
        for result in mapped(self, *args, **options):
            calls += 1
            if stops and calls >= stops[0]:
                calls = 0
                stops.pop(0)
                raise KeyboardInterrupt
            yield result

    monkeypatch.setattr(LocalExecutor, "map", map_)
    interruptions = 0
    while True:
        try:
            if (out / "config.yaml").exists() and newest(out / "checkpoints")[0] is not None:
                fedfleet.resume(out)
            else:
                shutil.rmtree(out, ignore_errors=True)
                fedfleet.Experiment(config(case)).run(out)
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 3
    monkeypatch.undo()
    check_equal(out, undisturbed(case))


@pytest.mark.parametrize("case", ["client state", "asynchronous"])
@pytest.mark.slow
def test_signals_at_any_moment(tmp_path, undisturbed, case):
    """Signals from outside, at random moments."""
    out, draw = tmp_path / "run", random.Random(1)
    kinds = itertools.cycle([signal.SIGINT, signal.SIGTERM])
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(next(kinds)))
    on_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    fedfleet.run(config(case).model_dump(mode="json"), {"rounds": 0}, out=out)
    try:
        for _ in range(40):
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.15))
            try:
                if fedfleet.resume(out, {"rounds": BASE["rounds"]}).summary["status"] == "finished":
                    break
            except (KeyboardInterrupt, SystemExit):
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGTERM, on_term)
    fedfleet.resume(out, {"rounds": BASE["rounds"]})
    check_equal(out, undisturbed(case))


@pytest.mark.parametrize("case", ["client state"])
@pytest.mark.slow
def test_killed_anywhere(tmp_path, undisturbed, case):
    """Kill -9 of the driver at random moments, until it has come to its end."""
    out, draw = tmp_path / "run", random.Random(2)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config(case).model_dump(mode="json")))
    slow = "import time, fedfleet.simulator.driver.simulate as s; add = s.Position.accept\n"
    slow += "s.Position.accept = lambda self, r: (time.sleep(0.05), add(self, r))[1]\n"
    slow += "from fedfleet.commands.cli import main; main()"
    killed = 0
    for _ in range(20):
        there = newest(out / "checkpoints")[0] is not None
        if not there:
            shutil.rmtree(out, ignore_errors=True)
        command = ["resume", out] if there else ["run", path, "--out", out]
        process = subprocess.Popen([sys.executable, "-c", slow, *map(str, command), "--no-report"])
        until = time.monotonic() + 60
        seen = len(list((out / "checkpoints").glob("*"))) if there else 0
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
            now = len(list((out / "checkpoints").glob("*"))) if out.exists() else 0
            if now != seen and killed < 3:
                time.sleep(draw.uniform(0, 0.08))
                process.kill()
                killed += process.wait() == -signal.SIGKILL
        if process.wait() == 0:
            break
    assert killed >= 1
    check_equal(out, undisturbed(case))


LONGER = ("stateless", "client state", "owed", "late answers", "asynchronous")


@pytest.mark.parametrize("case", slow_but(CASES, *LONGER))
@pytest.mark.parametrize("first", slow_but([3, 4], 3))
def test_more_rounds(tmp_path, undisturbed, case, first):
    """Also where the last round of the shorter run was evaluated for that reason alone."""
    out = fedfleet.run(BASE, {**CASES[case], "rounds": first}, out=tmp_path / "run").folder
    done = fedfleet.resume(out, ["rounds=9"])
    assert done.summary["rounds"] == 9
    check_equal(out, undisturbed(case))
    one, other = (yaml.safe_load((at / "config.yaml").read_text()) for at in (out, undisturbed(case)))
    assert one == other


def test_a_finished_run_says_so(tmp_path, command):
    out = fedfleet.Experiment(config("stateless")).run(tmp_path / "run").folder
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    status, said, error = command("resume", out, "--no-report")
    assert (status, said, error) == (0, "", f"{out}: finished, 9 rounds: give rounds=N to go on\n")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_stopped_run_says_why_and_goes_on_with_another_limit(tmp_path, undisturbed, command):
    given = {**CASES["stateless"], "until": "eval/accuracy=0.01"}
    out = fedfleet.Experiment(fedfleet.load(BASE, given)).run(tmp_path / "run").folder
    status, _, said = command("resume", out, "--no-report")
    assert (status, said) == (0, f"{out}: stopped after 0 rounds by until=eval/accuracy=0.01: give another to go on\n")
    assert command("resume", out, "until=null", "--no-report")[0] == 0
    check_equal(out, undisturbed("stateless"))


def test_a_failed_run_goes_on_where_it_failed(tmp_path, undisturbed):
    """Its last checkpoint is that of the round before; the attempts that came to nothing are in its tables until then."""
    case = {**CASES["stateless"], "cohort": {"size": 8, "min_responses": 6, "attempts": 1}}
    with pytest.raises(FedfleetError, match="in 1 cohorts in a row"):
        fedfleet.Experiment(fedfleet.load(BASE, case)).run(tmp_path / "run")
    outcomes = pd.read_parquet(tmp_path / "run" / "outcomes.parquet")
    rounds = pd.read_parquet(tmp_path / "run" / "rounds.parquet")
    assert (outcomes["round"].max(), set(outcomes[outcomes["round"] == len(rounds)]["attempt"])) == (len(rounds), {0})
    fedfleet.resume(tmp_path / "run", ["cohort.attempts=10"])
    assert len(outcome(tmp_path / "run")[1]["rounds"]) == 9


@pytest.mark.parametrize(("overrides", "says"), [
    (["algorithm.lr=0.5"], "algorithm.lr=0.5: a run goes on as it began"),
    (["executor.inner=serial"], "executor.inner='serial': a run goes on as it began"),
    (["rounds=3"], "rounds=3: the run has done 9 already: give more"),
    (["cohrt.invite=3"], "cohrt.invite=3: a run goes on as it began"),
])  # fmt: skip
def test_what_may_not_change(undisturbed, command, overrides, says):
    status, _, error = command("resume", undisturbed("stateless"), *overrides)
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: {says}")


def test_nothing_to_go_on_from(tmp_path, command, undisturbed):
    status, _, error = command("resume", tmp_path / "none")
    assert (status, error) == (2, f"error: {tmp_path / 'none'}: no such folder: give the folder of a run\n")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text("{}")
    assert "a study: the `fedfleet study` that began it" in command("resume", tmp_path / "study")[2]
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    status, _, error = command("resume", out, "rounds=12")
    assert (status, error) == (2, f"error: {out}: no checkpoint to go on from: start the run anew\n")


def test_stopped_before_the_first_checkpoint(tmp_path, command, undisturbed, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "run", lambda *_: None)
        fedfleet.Experiment(config("stateless")).run(out)
    assert sorted(p.name for p in out.iterdir()) == [
        *(".lock", "checkpoints", "config.yaml", "environment.json", "status.json")
    ]
    status, _, said = command("resume", out, "--no-report")
    assert (status, said.count("before its first checkpoint, and begins again")) == (0, 1)
    check_equal(out, undisturbed("stateless"))


def test_interrupted_before_the_first_checkpoint(tmp_path, command, undisturbed, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    out, path = tmp_path / "run", tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config("stateless").model_dump(mode="json")))
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "_rounds", interrupted)
        status, _, error = command("run", path, "--out", out)
    told = f"interrupted after 0 of {BASE['rounds']} rounds: go on with `fedfleet resume {out}`"
    assert (status, error.splitlines()[2:]) == (130, [told])
    assert (out / "rounds.parquet").exists()
    assert command("resume", out, "--no-report")[0] == 0
    check_equal(out, undisturbed("stateless"))
    shutil.rmtree(out / "checkpoints")
    (out / "rounds.parquet").write_text("none")
    assert command("resume", out, "rounds=12")[2] == f"error: {out}: no checkpoint to go on from: start the run anew\n"


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("lr: 0.1", "lr: 0.3", "algorithm.lr=0.3"),
        ("steps: 2", "steps: 3", "algorithm.steps=3"),
        ("rate: 0.7", "rate: 0.5", "availability.rate=0.5"),
        ("\n  size: 8", "\n  size: 9", "cohort.size=9"),
        ("block_size: 3", "block_size: 2", "executor.block_size=2"),
        ("\nseed: 0", "\nseed: 1", "seed=1"),
    ],
)
def test_an_edited_or_damaged_configuration_is_not_gone_on_with(tmp_path, undisturbed, before, after, key):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    text = (out / "config.yaml").read_text()
    assert before in text
    (out / "config.yaml").write_text(text.replace(before, after, 1))
    files = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=rf"config\.yaml: {re.escape(key)}, and the run's checkpoint was made with"):
        fedfleet.resume(out, ["rounds=10"])
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == files


def test_of_two_runs_on_one_folder_one_is_refused(tmp_path, monkeypatch):
    """The second comes while the workers of the first start; or it looked before the first began, which has ended since."""
    out, made = tmp_path / "run", fedfleet.Experiment._folder

    def slow(self, *given):
        with pytest.raises(ConfigError, match=r"run: it exists and is not empty"):
            fedfleet.Experiment(config("stateless")).run(out)
        with pytest.raises(ConfigError, match="another process is at work in it"):
            locked(out)
        return made(self, *given)

    monkeypatch.setattr(fedfleet.Experiment, "_folder", slow)
    run = fedfleet.Experiment(config("stateless")).run(out)
    monkeypatch.undo()
    model = (run.folder / "model.safetensors").read_bytes()
    looked = runfolder.check_free
    monkeypatch.setattr(runfolder, "check_free", lambda folder: monkeypatch.setattr(runfolder, "check_free", looked))
    with pytest.raises(ConfigError, match="it exists and is not empty"), runfolder.claimed(out):
        pass
    assert (run.folder / "model.safetensors").read_bytes() == model


def test_a_run_that_did_not_begin_leaves_a_folder_for_the_next(tmp_path, monkeypatch):
    def broken(self, *given):
        raise FedfleetError("no workers")

    with monkeypatch.context() as patched:
        patched.setattr(fedfleet.Experiment, "_folder", broken)
        with pytest.raises(FedfleetError, match="no workers"):
            fedfleet.Experiment(config("stateless")).run(tmp_path / "run")
    assert not [*(tmp_path / "run").iterdir()]


def test_other_data_are_refused(tmp_path, undisturbed, monkeypatch):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    monkeypatch.setattr(fedfleet.Experiment, "fingerprint", "of others")
    with pytest.raises(ConfigError, match="its clients or test data were others"):
        fedfleet.resume(out, ["rounds=10"])


def test_another_environment_is_on_record(tmp_path, undisturbed):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    path = out / "environment.json"
    path.write_text(path.read_text().replace('"python": "', '"python": "2.'))
    done = fedfleet.resume(out, ["rounds=10"])
    assert not done.summary["bit_exact"]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert events == [
        {"round": 9, "event": "resumed"},
        {"round": 9, "event": "environment_changed", "of": ["python"], "bit_exact": False},
    ]


@pytest.mark.slow
def test_several_runs_go_on_one_after_the_other(tmp_path, command):
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    several = {"rounds": 4, "seeds": [0, 1], "compare": {"a": {}, "b": {"algorithm.lr": 0.05}}}
    path.write_text(yaml.safe_dump({**BASE, **CASES["stateless"], **several}))
    assert command("run", path, "--out", tmp_path / "peace", "--no-report")[0] == 0
    shutil.copytree(tmp_path / "peace", out)
    finished = out / "a" / "seed-0" / "summary.json"
    times = finished.stat().st_mtime_ns
    shutil.rmtree(out / "b" / "seed-1")  # never begun
    shutil.rmtree(out / "b" / "seed-0" / "checkpoints")  # killed before its first checkpoint
    (out / "b" / "seed-0" / "summary.json").unlink()
    cut = out / "a" / "seed-1"
    (cut / "summary.json").unlink()
    max((cut / "checkpoints").glob("round-*")).unlink()
    status, _, said = command("resume", out, "rounds=1")
    assert (status, said.count("\n")) == (2, 1)
    assert "has done " in said
    status, _, said = command("resume", out)
    assert status == 0
    assert "1 of 4 runs are at their end" in said
    assert "going on after 3 rounds" in said
    assert (out / "report.html").is_file()
    assert finished.stat().st_mtime_ns == times
    for place in ("a/seed-0", "a/seed-1", "b/seed-0", "b/seed-1"):
        check_equal(out / place, tmp_path / "peace" / place)
    status, _, said = command("resume", out, "rounds=6", "--no-report")
    assert (status, said.count("going on after 4 rounds")) == (0, 4)
    assert yaml.safe_load((out / "campaign.yaml").read_text())["rounds"] == 6
    assert all(json.loads(p.read_text())["rounds"] == 6 for p in out.glob("*/*/summary.json"))


@pytest.mark.parametrize(("best", "largest"), [("auto", True), ("eval/loss", False)])
def test_the_best_model_is_kept(tmp_path, best, largest):
    case = {**CASES["stateless"], "evaluation": {"every": 1}, "algorithm": {"name": "fedavg", "steps": 2, "lr": 3.0}}
    run = fedfleet.run(BASE, {**case, "checkpoint.best": best}, out=tmp_path / "run")
    metric = "eval/accuracy" if best == "auto" else best
    values = [run.summary["initial"][metric], *run.rounds[metric]]
    at = values.index(max(values) if largest else min(values))
    short = fedfleet.run(BASE, {**case, "rounds": at}, out=tmp_path / "short")
    assert (run.folder / "best.safetensors").read_bytes() == (short.folder / "model.safetensors").read_bytes()
    assert run.summary["selected"] == (short.summary["final"] if at else run.summary["initial"])


def test_the_best_model_of_a_longer_run_is_its_own(tmp_path, command):
    """The last evaluation of the shorter run, its best, is none of the longer one's."""
    values = {**CASES["stateless"], "evaluation": {"every": 4}, "algorithm": {"name": "fedavg", "steps": 2, "lr": 0.05}}
    whole = fedfleet.run(BASE, {**values, "rounds": 7}, out=tmp_path / "whole")
    run = fedfleet.run(BASE, {**values, "rounds": 6}, out=tmp_path / "run")
    best = (run.folder / "best.safetensors").read_bytes()
    assert best == (run.folder / "model.safetensors").read_bytes()
    assert command("resume", run.folder, "rounds=6", "--no-report")[0] == 0
    assert (run.folder / "best.safetensors").read_bytes() == best
    before = (run.folder / "checkpoints" / "best.safetensors").read_bytes()
    fedfleet.resume(run.folder, {"rounds": 7})
    assert (run.folder / "checkpoints" / "best.safetensors").read_bytes() == before
    check_equal(run.folder, whole.folder)


def test_a_best_model_of_a_later_round_than_the_run_has_is_removed(tmp_path):
    """A process was killed after it, and before the next checkpoint; the run that goes on ends before that round."""
    values = {**CASES["stateless"], "evaluation": {"every": 1}, "algorithm": {"name": "fedavg", "steps": 2, "lr": 0.05}}
    run, longer = (fedfleet.run(BASE, {**values, "rounds": n}, out=tmp_path / str(n)) for n in (2, 4))
    (run.folder / "best.safetensors").write_bytes((longer.folder / "best.safetensors").read_bytes())
    (run.folder / "summary.json").unlink()
    fedfleet.resume(run.folder)
    assert not (run.folder / "best.safetensors").exists()
    assert "best_model_removed" in (run.folder / "events.jsonl").read_text()


def test_an_unknown_best_is_refused_and_none_is_kept_where_none_is_wanted(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.best='eval/auc': unknown; .*eval/accuracy"):
        fedfleet.Experiment(fedfleet.load(BASE, {**CASES["stateless"], "checkpoint.best": "eval/auc"}))
    run = fedfleet.run(BASE, {**CASES["stateless"], "checkpoint.best": None}, out=tmp_path / "run")
    assert not (run.folder / "best.safetensors").exists()
    assert run.summary["selected"] == {}


def test_what_a_client_does_stands_in_the_configuration_and_older_folders_are_gone_on_with(tmp_path):
    given = {**BASE, "algorithm": {"name": "fedavg", "batch_size": 5}, "rounds": 2}
    first = fedfleet.run(given, out=tmp_path / "run")
    written = (first.folder / "config.yaml").read_text()
    assert "steps: null" in written
    assert "epochs: 1" in written
    (first.folder / "config.yaml").write_text(written.replace("epochs: 1", "epochs: null"))
    longer = {**given, "rounds": 3}
    done = run_or_go_on(fedfleet.Experiment(fedfleet.load(longer)), first.folder)
    assert done.rounds["round"].tolist() == [0, 1, 2]
    whole = fedfleet.run(longer, out=tmp_path / "whole")
    assert (done.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
