"""A run that goes on is the run that never stopped: the same bytes, wherever and however it was ended."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfleet
from fedfleet.checkpoint import Damaged, load, newest
from fedfleet.runner import Runner
from fedfleet.simulator import state
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.executors.local import LocalExecutor

BASE: dict[str, Any] = {
    "rounds": 9,
    "population": {"clients": 30, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 8}},
    "task": {"name": "classification", "model": "logistic"},
    "availability": {"kind": "bernoulli", "rate": 0.7},
    "devices": "lognormal",
    "executor": {"kind": "local", "block_size": 3},
    "evaluation": {"every": 2},
    "checkpoint": {"every_s": 0},
}
CASES: dict[str, dict[str, Any]] = {
    "stateless": {"algorithm": {"name": "fedavg", "steps": 2}, "evaluation": {"every": 2, "per_client": True}},
    "server state": {"algorithm": {"name": "fedopt", "steps": 2}, "selection": "round_robin"},
    "two phases": {"task": {"name": "auc", "model": "logistic"}, "algorithm": {"name": "cdma_ada", "steps": 2}},
    "client state": {"algorithm": {"name": "scaffold", "steps": 2}, "cohort": {"min_responses": 4, "attempts": 50}},
    "late answers": {
        "algorithm": {"name": "fedavg", "steps": 2},
        "cohort": {"late": "keep", "stale_discount": 0.5, "respond": 4},
        "selection": "oort",
    },
    "asynchronous": {"algorithm": {"name": "fedbuff", "steps": 2, "buffer": 5, "concurrency": 12}},
}
for name, case in CASES.items():
    if name != "asynchronous":
        case["cohort"] = {"invite": 8, "respond": "siwer", **case.get("cohort", {})}
TABLES = ("rounds", "phases", "fates", "clients")


def config(case: str) -> fedfleet.Config:
    return fedfleet.load(BASE, CASES[case])


def outcome(run: Path) -> tuple[bytes, dict[str, pd.DataFrame], dict[str, Any]]:
    tables = {t: pd.read_parquet(run / f"{t}.parquet") for t in TABLES if (run / f"{t}.parquet").exists()}
    summary = json.loads((run / "summary.json").read_text())
    said = {k: v for k, v in summary.items() if "seconds" not in k}
    tables["rounds"] = tables["rounds"].drop(columns="seconds")
    return (run / "model.safetensors").read_bytes(), tables, said


def check_equal(run: Path, other: Path) -> None:
    (model, tables, summary), (model_2, tables_2, summary_2) = outcome(run), outcome(other)
    assert model == model_2
    assert list(tables) == list(tables_2)
    for name, frame in tables.items():
        pd.testing.assert_frame_equal(frame, tables_2[name], check_exact=True)
    assert summary == summary_2
    assert (run / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()
    assert not (run / "fates").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a run of a case that never stopped."""
    folder, done = tmp_path_factory.mktemp("undisturbed"), {}

    def run(case: str) -> Path:
        if case not in done:
            done[case] = fedfleet.Experiment(config(case)).run(folder / case).folder
        return done[case]

    return run


@pytest.mark.parametrize("case", CASES)
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
def test_signals_at_any_moment(tmp_path, undisturbed, case):
    """A signal from outside, between any two instructions of the interpreter."""
    out, draw = tmp_path / "run", random.Random(1)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    fedfleet.run(fedfleet.config.complete(config(case)), {"rounds": 0}, out=out)
    try:
        for _ in range(40):
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.001, 0.15))
            try:
                if fedfleet.resume(out, {"rounds": BASE["rounds"]}).summary["status"] == "finished":
                    break
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    fedfleet.resume(out, {"rounds": BASE["rounds"]})
    check_equal(out, undisturbed(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["client state"])
def test_killed_anywhere(tmp_path, undisturbed, case):
    """Kill -9 of the driver at random moments, until it has come to its end."""
    out, draw = tmp_path / "run", random.Random(2)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(fedfleet.config.complete(config(case))))
    slow = "import time, fedfleet.simulator.simulate as s; add = s.Position.accept\n"
    slow += "s.Position.accept = lambda self, r: (time.sleep(0.05), add(self, r))[1]\n"
    slow += "from fedfleet.cli import main; main()"
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", [3, 4])
def test_more_rounds(tmp_path, undisturbed, case, first):
    """Also where the last round of the shorter run was evaluated for that reason alone."""
    out = fedfleet.Experiment(fedfleet.load(BASE, {**CASES[case], "rounds": first})).run(tmp_path / "run").folder
    done = fedfleet.resume(out, ["rounds=9"])
    assert done.summary["rounds"] == 9
    check_equal(out, undisturbed(case))
    assert yaml.safe_load((out / "config.yaml").read_text()) == yaml.safe_load(
        (undisturbed(case) / "config.yaml").read_text()
    )


def test_a_finished_run_says_so(tmp_path, command):
    out = fedfleet.Experiment(config("stateless")).run(tmp_path / "run").folder
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    status, said, error = command("resume", out, "--no-report")
    assert (status, said, error) == (0, f"{out}: finished, 9 rounds: give rounds=N to go on\n", "")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_stopped_run_says_why_and_goes_on_with_another_limit(tmp_path, undisturbed, command):
    given = {**CASES["stateless"], "until": "eval/accuracy=0.01"}
    out = fedfleet.Experiment(fedfleet.load(BASE, given)).run(tmp_path / "run").folder
    status, said, _ = command("resume", out, "--no-report")
    assert (status, said) == (0, f"{out}: stopped after 0 rounds by until=eval/accuracy=0.01: give another to go on\n")
    assert command("resume", out, "until=null", "--no-report")[0] == 0
    check_equal(out, undisturbed("stateless"))


def test_a_failed_run_goes_on_where_it_failed(tmp_path, undisturbed):
    """Its last checkpoint is that of the round before; the attempts that came to nothing are in its tables until then."""
    case = {**CASES["stateless"], "cohort": {"invite": 8, "min_responses": 6, "attempts": 1}}
    with pytest.raises(FedfleetError, match="in 1 cohorts in a row"):
        fedfleet.Experiment(fedfleet.load(BASE, case)).run(tmp_path / "run")
    fates = pd.read_parquet(tmp_path / "run" / "fates.parquet")
    rounds = pd.read_parquet(tmp_path / "run" / "rounds.parquet")
    assert fates["round"].max() == len(rounds)
    assert set(fates[fates["round"] == len(rounds)]["attempt"]) == {0}
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("attempts: 1", "attempts: 10"))
    fedfleet.resume(tmp_path / "run")
    assert len(outcome(tmp_path / "run")[1]["rounds"]) == 9


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.lr=0.5"], "algorithm.lr=0.5: a run goes on as it began"),
        (["executor.inner=serial"], "executor.inner='serial': a run goes on as it began"),
        (["rounds=3"], "rounds=3: the run has done 9 already: give more"),
        (["cohrt.invite=3"], "cohrt.invite=3: a run goes on as it began"),
    ],
)
def test_what_may_not_change(undisturbed, command, overrides, says):
    status, _, error = command("resume", undisturbed("stateless"), *overrides)
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: {says}")


def test_nothing_to_go_on_from(tmp_path, command, undisturbed):
    status, _, error = command("resume", tmp_path / "none")
    assert (status, error) == (2, f"error: {tmp_path / 'none'}: no config.yaml there: give the folder of a run\n")
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    status, _, error = command("resume", out, "rounds=12")
    assert (status, error) == (2, f"error: {out}: no checkpoint to go on from: start the run anew\n")


def test_stopped_before_the_first_checkpoint(tmp_path, command, undisturbed, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "run", lambda *_: None)
        fedfleet.Experiment(config("stateless")).run(out)
    assert sorted(p.name for p in out.iterdir()) == [".lock", "checkpoints", "config.yaml", "environment.json"]
    status, said, _ = command("resume", out, "--no-report")
    assert (status, said.count("before its first checkpoint, and begins again")) == (0, 1)
    check_equal(out, undisturbed("stateless"))


@pytest.mark.parametrize("text", ["[]", "null", "{", ""])
def test_a_damaged_summary_is_none(tmp_path, command, undisturbed, text):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    (out / "summary.json").write_text(text)
    status, _, _ = command("resume", out, "--no-report")
    assert status == 0
    check_equal(out, undisturbed("stateless"))


def test_other_data_are_refused(tmp_path, undisturbed):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    path = out / "config.yaml"
    path.write_text(path.read_text().replace("partition_seed: 0", "partition_seed: 1"))
    with pytest.raises(ConfigError, match="its clients or test data were others"):
        fedfleet.resume(out, ["rounds=10"])


def test_parts_in_python_are_asked_for(tmp_path):
    x = fedfleet.Experiment(config("stateless"))
    out = (
        fedfleet.Experiment(fedfleet.load(BASE, {**CASES["stateless"], "rounds": 2}), task=x.task)
        .run(tmp_path / "run")
        .folder
    )
    with pytest.raises(ConfigError, match="the run had a task of its own, made in Python"):
        fedfleet.resume(out, ["rounds=3"])
    assert fedfleet.resume(out, ["rounds=3"], task=x.task).summary["rounds"] == 3


@pytest.mark.parametrize("case", ["client state", "late answers"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, undisturbed, case):
    out = fedfleet.Experiment(fedfleet.load(BASE, {**CASES[case], "rounds": 6})).run(tmp_path / "run").folder
    old, new = sorted((out / "checkpoints").glob("*.safetensors"))
    new.write_bytes(new.read_bytes()[:-7])
    said: list[str] = []
    progress = fedfleet.progress.Progress.silent()
    progress.say = said.append
    fedfleet.resume(out, ["rounds=9"], progress)
    assert any(f"{new}: not a readable checkpoint" in line for line in said)
    assert any("going on after 5 rounds" in line for line in said)
    check_equal(out, undisturbed(case))
    assert not old.exists()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_checkpoint_is_read_whole_or_not_at_all(undisturbed, tmp_path_factory, data):
    whole = max((undisturbed("asynchronous") / "checkpoints").glob("*.safetensors")).read_bytes()
    path = tmp_path_factory.mktemp("damaged") / "round-1.safetensors"
    if data.draw(st.booleans()):
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        damaged = bytearray(whole)
        damaged[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    with pytest.raises(Damaged):
        load(path)


def test_damaged_client_states_are_found(tmp_path, undisturbed):
    out = shutil.copytree(undisturbed("client state"), tmp_path / "run")
    path = out / "checkpoints" / "states.bin"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FedfleetError, match=r"states\.bin: cut short"):
        fedfleet.resume(out, ["rounds=12"])


def test_a_second_process_is_kept_out(tmp_path, undisturbed):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    holder = f"import fcntl, time; f = open({str(out / '.lock')!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{holder}; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match="another process is at work in it"):
            fedfleet.resume(out, ["rounds=12"])
    finally:
        process.kill()
        process.wait()
    fedfleet.resume(out, ["rounds=10"])


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, undisturbed):
    """No file may grow beyond a few KB: what a full disk does, for this process alone."""
    out = fedfleet.Experiment(fedfleet.load(BASE, {**CASES["client state"], "rounds": 4})).run(tmp_path / "run").folder
    newer = max((out / "checkpoints").glob("*.safetensors"))
    before, limits = newer.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    x = fedfleet.Experiment(config("client state"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, limits[1]))
    try:
        with pytest.raises(
            FedfleetError, match=rf"{out}: cannot be written \(.+\): mend that, then go on with `fedfleet resume"
        ):
            x.resume(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newer.read_bytes() == before
    fedfleet.resume(out, ["rounds=9"])
    check_equal(out, undisturbed("client state"))


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
    status, said, _ = command("resume", out)
    assert status == 0
    assert "1 of 4 runs are at their end" in said
    assert "going on after 3 rounds" in said
    assert (out / "report.html").is_file()
    assert finished.stat().st_mtime_ns == times
    for place in ("a/seed-0", "a/seed-1", "b/seed-0", "b/seed-1"):
        check_equal(out / place, tmp_path / "peace" / place)
    status, said, _ = command("resume", out, "rounds=6", "--no-report")
    assert (status, said.count("going on after 4 rounds")) == (0, 4)
    assert yaml.safe_load((out / "campaign.yaml").read_text())["rounds"] == 6
    assert all(json.loads(p.read_text())["rounds"] == 6 for p in out.glob("*/*/summary.json"))


@pytest.mark.parametrize(("best", "largest"), [("auto", True), ("eval/loss", False)])
def test_the_best_model_is_kept(tmp_path, best, largest):
    case = {**CASES["stateless"], "evaluation": {"every": 1}, "algorithm": {"name": "fedavg", "steps": 2, "lr": 3.0}}
    run = fedfleet.Experiment(fedfleet.load(BASE, {**case, "checkpoint.best": best})).run(tmp_path / "run")
    metric = "eval/accuracy" if best == "auto" else best
    values = [run.summary["initial"][metric], *run.rounds[metric]]
    at = values.index(max(values) if largest else min(values))
    short = fedfleet.Experiment(fedfleet.load(BASE, {**case, "rounds": at})).run(tmp_path / "short")
    assert (run.folder / "best.safetensors").read_bytes() == (short.folder / "model.safetensors").read_bytes()


def test_the_best_model_of_a_longer_run_is_its_own(tmp_path, command):
    """The last evaluation of the shorter run, its best, is none of the longer one's."""
    values = {**CASES["stateless"], "evaluation": {"every": 4}, "algorithm": {"name": "fedavg", "steps": 2, "lr": 0.05}}
    whole = fedfleet.Experiment(fedfleet.load(BASE, {**values, "rounds": 7})).run(tmp_path / "whole")
    run = fedfleet.Experiment(fedfleet.load(BASE, {**values, "rounds": 6})).run(tmp_path / "run")
    best = (run.folder / "best.safetensors").read_bytes()
    assert best == (run.folder / "model.safetensors").read_bytes()
    assert command("resume", run.folder, "rounds=6", "--no-report")[0] == 0
    assert (run.folder / "best.safetensors").read_bytes() == best
    before = (run.folder / "checkpoints" / "best.safetensors").read_bytes()
    fedfleet.resume(run.folder, {"rounds": 7})
    assert (run.folder / "checkpoints" / "best.safetensors").read_bytes() == before
    check_equal(run.folder, whole.folder)


def test_an_unknown_best_is_refused_and_none_is_kept_where_none_is_wanted(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.best='eval/auc': unknown; .*eval/accuracy"):
        fedfleet.Experiment(fedfleet.load(BASE, {**CASES["stateless"], "checkpoint.best": "eval/auc"}))
    run = fedfleet.Experiment(fedfleet.load(BASE, {**CASES["stateless"], "checkpoint.best": None})).run(
        tmp_path / "run"
    )
    assert not (run.folder / "best.safetensors").exists()


def test_a_process_killed_while_it_wrote(tmp_path, undisturbed):
    """A part, a checkpoint and an event that were under way are nothing."""
    given = {**CASES["stateless"], "rounds": 5}
    out = fedfleet.Experiment(fedfleet.load(BASE, given)).run(tmp_path / "run").folder
    (out / "fates.part.tmp").write_bytes(b"PAR1")
    (out / "fates").mkdir()
    (out / "checkpoints" / "round-00000009.tmp").write_bytes(b"half")
    (out / "events.jsonl").write_text('{"round": 3, "event": "worker_died"}\n{"round": 4, "ev')
    fedfleet.resume(out, ["rounds=9"])
    check_equal(out, undisturbed("stateless"))
    events = [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert events == ["worker_died", "resumed"]


def test_a_disk_that_fails_in_the_middle_of_a_commit(tmp_path, undisturbed, monkeypatch):
    out, write, calls = tmp_path / "run", state._write, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 30:
            raise OSError(5, "Input/output error")
        write(*args)

    x = fedfleet.Experiment(config("client state"))
    monkeypatch.setattr(state, "_write", failing)
    with pytest.raises(FedfleetError, match="Input/output error"):
        x.run(out)
    assert fedfleet.resume(out).summary["rounds"] > 0
    check_equal(out, undisturbed("client state"))
