"""The folder of a Ray that a run starts: private, short, gone with the run, and what dead processes left with it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedfleet.simulator.executors import session
from fedfleet.simulator.executors.session import INNER, LOCK, LONGEST, PREFIX, Session, sweep

HOLD = "import sys, time; from pathlib import Path; from fedfleet.simulator.executors.session import Session\n"
HOLD += "s = Session(Path(sys.argv[1])); print(s.folder, flush=True); time.sleep(600)"


@pytest.fixture
def held(tmp_path):
    """The folder of another process, and that process."""
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process
        process.kill()


def test_a_folder_is_private_and_goes(tmp_path):
    one, other = Session(tmp_path), Session(tmp_path)
    assert one.folder != other.folder
    assert stat.S_IMODE(one.folder.stat().st_mode) == 0o700
    assert one.temporary == one.folder / INNER
    one.temporary.mkdir(mode=0o777)
    (one.temporary / "log").write_text("late")
    one.close()
    assert list(tmp_path.iterdir()) == [other.folder]
    other.close()
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_swept_and_nothing_else_is(tmp_path, held):
    folder, process = held
    others = [tmp_path / "ray", tmp_path / f"{PREFIX}new", tmp_path / f"{PREFIX}link"]
    for other in others[:2]:  # the second is about to get its lock
        other.mkdir()
    (tmp_path / "ray" / LOCK).write_text("")
    others[2].symlink_to(tmp_path / "ray")
    sweep(tmp_path)
    assert {*tmp_path.iterdir()} == {folder, *others}
    process.send_signal(signal.SIGKILL)
    process.wait()
    Session(tmp_path).close()
    assert {*tmp_path.iterdir()} == {*others}
    os.utime(others[1], (0, time.time() - 2 * session.YOUNG_S))
    sweep(tmp_path)
    assert {*tmp_path.iterdir()} == {others[0], others[2]}
    assert (tmp_path / "ray" / LOCK).exists()


def test_sockets_have_room_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("x" * 60)
    long.mkdir()
    for wanted in (str(long), str(tmp_path / "missing"), "/tmp"):
        monkeypatch.setenv("TMPDIR", wanted)
        found = Session()
        assert len(str(found.folder)) <= LONGEST
        assert found.folder.parent == Path("/tmp")
        found.close()
