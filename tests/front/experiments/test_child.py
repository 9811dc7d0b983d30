"""A child ends once its parent is gone, also one that was killed, and never before."""

import os
import select
import subprocess
import sys

from fedfleet.experiments.child import child

SLEEPER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
print("child of", *sys.argv[1:], flush=True)
signal.pause()
"""
PARENT = """
import signal
from fedfleet.experiments.child import child
with child("sleeper", "a b") as process:
    print(process.pid, process.stdout.readline().strip(), flush=True)
    signal.pause()
"""


def test_a_child_ends_when_its_parent_is_killed(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        try:
            pid, said = parent.stdout.readline().split(maxsplit=1)
            assert said == "child of a b\n"
            end = os.pidfd_open(int(pid))
        finally:
            parent.kill()
    assert select.select([end], [], [], 20)[0], "the child is still there"
    os.close(end)


def test_a_child_ends_by_itself_while_its_parent_lives(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with child("sleeper", "x") as process:
        assert process.communicate(timeout=20)[0] == "['x']\n"
    assert process.returncode == 3
