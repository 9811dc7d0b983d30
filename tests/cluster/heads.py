"""A Ray head on 127.0.0.1, by the command line, for what needs Ray's agents and its autoscaler: ``pip install "ray[default]"``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
WANTED = ("aiohttp", "opentelemetry", "prometheus_client")


def missing() -> str | None:
    """Say what of ``ray[default]`` is not installed."""
    lacking = [name for name in WANTED if find_spec(name) is None]
    return f"Ray lacks {', '.join(lacking)}: pip install 'ray[default]'" if lacking else None


def free() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    """Return what processes of the cluster are started with."""
    return {**os.environ, "RAY_AUTH_MODE": "token", **more}


@contextmanager
def head(port: int, *options: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start a head with a token, give its address, and stop all of it in the end."""
    start = ["start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", *options]
    subprocess.run([*RAY, *start], env=environment(**(env or {})), check=True, capture_output=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        subprocess.run([*RAY, "stop", "--force"], env=environment(), check=True, capture_output=True)


@contextmanager
def running(out: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Have a run go on, and end it in the end."""
    given = ("configs/cdma/digits.yaml", *overrides, "--out", str(out), "--no-report")
    command = [sys.executable, "-m", "fedfleet", "run", *given]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
