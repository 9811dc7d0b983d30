"""``python -m tests.chaos.interrupted --each 5``: Ctrl-C so often in each part of a run on Ray, from its first import to its end.

Each time: no crash, no hang, one line that says how to go on; that line is true; and no process is left, neither Ray's nor ours.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from fedfleet.commands.terminal import AGAIN
from fedfleet.config.schema import load
from tests.chaos.soak import unlike
from tests.refusals import without_progress

SHORT = {
    "rounds": 20,
    "population": {"clients": 60},
    "task": {"name": "classification", "model": "logistic"},
    "algorithm": {"name": "scaffold", "epochs": 1, "batch_size": 7},
    "cohort": {"size": 12},
    "executor": {"kind": "ray", "actors": 2, "cpus_per_actor": 0.5, "block_size": 3},
    "evaluation": {"every": 5},
    "checkpoint": {"every_s": 0.5},
}
PARTS = ("imports, loads", "begins", "starts Ray", "starts actors", "rounds", "ends Ray", "reports", "ends")
LATE = PARTS[-3:]  # of these some are done before they know
MARK = "FEDFLEET_INTERRUPTED_BY"  # in the environment of all that a run starts
LOOK_S = 0.1  # between two looks at a run
END_S = 120.0  # until one that was interrupted has ended, on a machine with other work
LEFT_S = 20.0  # and what it has started
FIRST_S = 0.3  # before, Python itself starts, and has no handlers yet
PRESSED = 130


class Found(NamedTuple):
    """What a run was about when it was interrupted, how long it then took to end, and what was wrong."""

    about: str
    took_s: float
    wrong: list[str]


def written(folder: Path) -> Path:
    """Write down a run of some seconds on two actors."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(load(SHORT).model_dump(mode="json")), encoding="utf-8")
    return path


class Run:
    """A command of fedfleet in a session of its own, as a terminal's, and all processes that come of it."""

    def __init__(self, *command: object):
        self._mark = secrets.token_hex()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 # a pipe might be held open by what is left behind
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedfleet", *map(str, command)],
            env={**os.environ, MARK: self._mark},
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,
        )

    def _listens(self) -> bool:
        """Say whether its Python has begun to catch SIGINT: before, a system ends any process by it without a word."""
        with suppress(OSError):
            found = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{self.process.pid}/status").read_text(), re.M)
            return found is not None and bool(int(found[1], 16) >> (signal.SIGINT - 1) & 1)
        return True  # it is over

    def press(self) -> None:
        """Send SIGINT to all that a terminal would, once Python listens."""
        while not self._listens() and self.process.poll() is None:
            time.sleep(LOOK_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> dict[int, str]:
        """Return what there is of it, by number: command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
        return found

    def about(self, out: Path) -> str | None:
        """Say which part of a run in ``out`` it is in, as far as one can see from outside; None after its end."""
        if self.process.poll() is not None:
            return None
        has = " ".join(self.processes().values())
        if (out / "summary.json").exists():
            return "ends Ray" if "gcs_server" in has else "ends" if (out / "report.html").exists() else "reports"
        if any((out / "checkpoints").glob("round-*")):
            return "rounds"
        if "gcs_server" in has:
            return "starts actors" if "ray::ClientActor" in has else "starts Ray"
        return "begins" if (out / "config.yaml").exists() else "imports, loads"

    def ended(self) -> int | None:
        """Return the status with which it ends, None where it hangs."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def left(self) -> list[str]:
        """Return what is left of it some seconds after its end, and end that."""
        until = time.monotonic() + LEFT_S
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(LOOK_S)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(found.values())

    def said(self) -> str:
        """Return what it has said on standard error."""
        self._said.seek(0)
        return without_progress(self._said.read().decode(errors="replace"))


def in_peace(path: Path, out: Path) -> dict[str, float]:
    """Run without an interruption; return the seconds that each part took."""
    run = Run("run", path, "--out", out)
    took, at = dict[str, float].fromkeys(PARTS, 0.0), time.monotonic()
    while (part := run.about(out)) is not None:
        time.sleep(LOOK_S)
        now = time.monotonic()
        took[part], at = took[part] + now - at, now
    assert run.process.returncode == 0, run.said()
    return took


def interrupt(path: Path, out: Path, part: str, after_s: float, expected: Path | None = None) -> Found:
    """Interrupt a run so long after a part of it has begun, and go on with it where its result is to be as ``expected``."""
    run = Run("run", path, "--out", out)
    while (about := run.about(out)) is not None and PARTS.index(about) < PARTS.index(part):
        time.sleep(LOOK_S)
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(FIRST_S + after_s if part == PARTS[0] else after_s)
    about = run.about(out) or "is over"
    run.press()
    started = time.monotonic()
    status = run.ended()
    took_s = time.monotonic() - started
    wrong = [f"left: {command}" for command in run.left()]
    said, begun = run.said(), (out / "config.yaml").exists()
    fix = rf"interrupted( after [\d,]+ of [\d,]+ rounds)?: go on with `fedfleet resume {re.escape(str(out))}`\n"
    if status == 0 and about not in (*LATE, "is over"):
        wrong.append("it went on")
    elif status != (0 if said == "" else PRESSED):
        wrong.append(f"status {status}: {said[-3000:]}")
    elif not (said == "" or re.fullmatch(fix, said) if begun else said in ("interrupted\n", f"interrupted: {AGAIN}\n")):
        wrong.append(f"said: {said[-3000:]}")
    if not begun and out.exists() and any(out.iterdir()):
        wrong.append(f"a folder with {sorted(p.name for p in out.iterdir())}, which no command takes")
    if begun and expected is not None:
        again = Run("resume", out, "executor.kind=local")
        status = again.ended()
        wrong += [f"left of resume: {command}" for command in again.left()]
        if status != 0:
            wrong.append(f"resume: status {status}: {again.said()[-1000:]}")
        elif differ := unlike(out, expected):
            wrong.append(f"resume: {', '.join(differ)} differ")
    return Found(about, took_s, wrong)


def main() -> int:
    """Interrupt runs; the exit status is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.interrupted", description=__doc__)
    parser.add_argument("--each", type=int, default=5, help="interruptions of each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    args = parser.parse_args()
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = written(folder)
        took = in_peace(path, folder / "peace")
        print(", ".join(f"{part} {seconds:.1f} s" for part, seconds in took.items()), flush=True)
        for part in args.parts:
            for i in range(args.each):
                after_s = took[part] * i / args.each
                one = interrupt(path, folder / f"{len(found)}", part, after_s, folder / "peace")
                verdict = "; ".join(one.wrong) or "as it should be"
                print(f"{part} + {after_s:.1f} s ({one.about}): ended after {one.took_s:.1f} s: {verdict}", flush=True)
                found.append(one)
    print(f"{len(found)} interruptions, {sum(not one.wrong for one in found)} as they should be")
    return int(any(one.wrong for one in found))


if __name__ == "__main__":
    sys.exit(main())
