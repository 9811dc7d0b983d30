"""Damaged files, full disks, and processes killed while they write, and what a run does about them."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedfleet
from fedfleet.experiments import parts, runfolder
from fedfleet.experiments.checkpoint import Damaged, load
from fedfleet.experiments.progress import Progress
from fedfleet.simulator.driver import state
from fedfleet.simulator.errors import FedfleetError
from tests.front.experiments.resuming import BASE, CASES, check_equal, config
from tests.refusals import tells


@pytest.mark.parametrize("text", ["[]", "null", "{", ""])
def test_a_damaged_summary_is_none(tmp_path, command, undisturbed, text):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    (out / "summary.json").write_text(text)
    status, _, _ = command("resume", out, "--no-report")
    assert status == 0
    check_equal(out, undisturbed("stateless"))


@pytest.mark.parametrize("case", ["client state", "late answers"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, undisturbed, case):
    out = fedfleet.Experiment(fedfleet.load(BASE, {**CASES[case], "rounds": 6})).run(tmp_path / "run").folder
    old, new = sorted((out / "checkpoints").glob("*.safetensors"))
    new.write_bytes(new.read_bytes()[:-7])
    said: list[str] = []
    progress = Progress.silent()
    progress.say = said.append
    fedfleet.resume(out, ["rounds=9"], progress)
    assert any(f"{new}: not a readable checkpoint" in line for line in said)
    assert any("going on after 5 rounds" in line for line in said)
    check_equal(out, undisturbed(case))
    assert not old.exists()


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
    tells(lambda: fedfleet.resume(out, ["rounds=12"]), "states.bin: cut short", FedfleetError)


def test_a_second_process_is_kept_out(tmp_path, undisturbed):
    out = shutil.copytree(undisturbed("stateless"), tmp_path / "run")
    holder = f"import fcntl, time; f = open({str(out / '.lock')!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{holder}; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        tells(lambda: fedfleet.resume(out, ["rounds=12"]), "another process is at work in it")
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
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 64, limits[1]))  # of seconds there may be fewer digits
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


def test_a_process_killed_while_it_wrote(tmp_path, undisturbed):
    """A part, a checkpoint and an event that were under way are nothing."""
    given = {**CASES["stateless"], "rounds": 5}
    out = fedfleet.Experiment(fedfleet.load(BASE, given)).run(tmp_path / "run").folder
    (out / "outcomes.part.tmp").write_bytes(b"PAR1")
    (out / "outcomes").mkdir()
    (out / "checkpoints" / "round-00000009.tmp").write_bytes(b"half")
    (out / "events.jsonl").write_text('{"round": 3, "event": "worker_died"}\n{"round": 4, "ev')
    fedfleet.resume(out, ["rounds=9"])
    check_equal(out, undisturbed("stateless"))
    events = [json.loads(line)["event"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert events == ["worker_died", "resumed"]


def test_a_disk_that_fails_in_the_middle_of_a_commit(tmp_path, undisturbed, monkeypatch):
    out, write, calls = tmp_path / "run", state.write_at, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 30:
            raise OSError(5, "Input/output error")
        write(*args)

    x = fedfleet.Experiment(config("client state"))
    monkeypatch.setattr(state, "write_at", failing)
    tells(lambda: x.run(out), "Input/output error", FedfleetError)
    assert fedfleet.resume(out).summary["rounds"] > 0
    check_equal(out, undisturbed("client state"))


@pytest.fixture
def written_beside(monkeypatch):
    """Tables are written after every round, while the next one runs."""
    monkeypatch.setattr(parts, "ROWS", 0)
    monkeypatch.setattr(runfolder, "FLUSH_EVERY_S", 0.0)
    threads, write = [], parts.pq.write_table

    def watched(*args: Any, **options: Any) -> None:
        threads.append(threading.current_thread())
        write(*args, **options)

    monkeypatch.setattr(parts.pq, "write_table", watched)
    return threads


def test_tables_are_written_beside_the_rounds(tmp_path, undisturbed, written_beside):
    out = fedfleet.Experiment(config("client state")).run(tmp_path / "run").folder
    check_equal(out, undisturbed("client state"))
    assert any(t is not threading.main_thread() for t in written_beside)


def test_what_goes_wrong_beside_a_round_ends_the_run_and_loses_nothing(
    tmp_path, undisturbed, written_beside, monkeypatch
):
    out, write = tmp_path / "run", parts.pq.write_table

    def failing(*args: Any, **options: Any) -> None:
        if len(written_beside) == 9 and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        write(*args, **options)

    monkeypatch.setattr(parts.pq, "write_table", failing)
    tells(lambda: fedfleet.Experiment(config("client state")).run(out), "No space left on device", FedfleetError)
    rounds, outcomes = (pd.read_parquet(out / f"{name}.parquet")["round"] for name in ("rounds", "outcomes"))
    assert len(rounds) > 1
    assert set(outcomes) == set(rounds)
    fedfleet.resume(out)
    check_equal(out, undisturbed("client state"))


class Removing(fedfleet.Callback):
    """A callback that takes the run's folder away once so many rounds are done."""

    def __init__(self, out, after, put_back):
        self.out, self.after, self.put_back = out, after, put_back

    def round(self, row, phases):
        if row["round"] == self.after:
            shutil.rmtree(self.out)
            if self.put_back:
                self.out.mkdir()


@pytest.mark.parametrize("put_back", [False, True])
@pytest.mark.parametrize("after", [0, 2, 3])
def test_a_folder_that_is_taken_away_ends_the_run_and_no_part_comes_back(tmp_path, after, put_back):
    out = tmp_path / "run"
    with pytest.raises(FedfleetError) as e:
        fedfleet.run(BASE, {"rounds": 4}, out=out, callbacks=Removing(out, after, put_back))
    assert str(e.value) == (
        f"{out}: it was removed, moved or replaced while the run was at work in it: start anew, in a folder that is left alone"
    )
    assert out.exists() == put_back
    assert not (put_back and any(out.iterdir()))
