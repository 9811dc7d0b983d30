"""A virtual environment for each peer, made on first use and kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.command import say

PACKAGES = {"pfl": ("pfl[pytorch]", "0.6.0"), "flower": ("flwr[simulation]", "1.41.0"), "jax": ("jax", "0.10.2")}
INSTALL_S = 3600


class Failure(Exception):
    """Something outside this program went wrong; the message is one line."""


def default_folder() -> Path:
    """Return where environments are kept: the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedfleet" / "peers"


def ready(folder: Path, peer: str) -> Path:
    """Return the folder of a peer's programs, after making its environment if it is not there. Raises Failure."""
    home = folder / peer
    programs, done = home / "bin", home / "installed.txt"
    if done.exists():
        return programs
    say(f"{peer}: making an environment in {home}")
    home.mkdir(parents=True, exist_ok=True)
    execute([sys.executable, "-m", "venv", str(home)], INSTALL_S)
    package, pinned = PACKAGES[peer]
    torch = f"torch=={version('torch').partition('+')[0]}"
    problem = Failure()
    for wanted in ([f"{package}=={pinned}", torch], [f"{package}=={pinned}"], [package]):
        say(f"{peer}: installing {' '.join(wanted)} (several GB)")
        pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        try:
            execute(pip, INSTALL_S)
        except Failure as e:
            problem = e
            continue
        done.write_text("\n".join(wanted) + "\n")
        return programs
    raise Failure(f"not installed: {problem}")


def execute(
    command: Sequence[str], limit_s: float, extra: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a program, with one thread for numerical libraries, and return what it prints.

    Raises Failure with the last line of its error where it fails, or takes longer than the limit; all it started then ends.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(extra or {})}
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as e:
        raise Failure(str(e)) from None
    try:
        out, err = process.communicate(timeout=limit_s)
    except BaseException as e:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(e, subprocess.TimeoutExpired):
            raise Failure(f"not done after {limit_s:.0f} s") from None
        raise
    if process.returncode:
        raise Failure(reason(err) or f"exit status {process.returncode}")
    return out


def reason(error: str) -> str:
    """Return the line of an error output that says what went wrong: the last one that names an error, else the last one."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    naming = [line for line in lines if re.match(r"(\[\w+\]:\s*)?(ERROR: |[\w.]*(Error|Exception)\b)", line)]
    return (naming or lines or [""])[-1][:300]
