"""A process of ours that ends once the one that started it is gone, even if that was killed.

Only the parent holds the writing end of a pipe that the child reads: the end of file tells that it is no more. Run as a
module, ``python -m fedfleet.experiments.child DESCRIPTOR MODULE ...``, this is ``python -m MODULE ...`` in such a child.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedfleet.simulator.errors import ConfigError


@contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``python -m COMMAND`` in a session of its own, to be waited for before the context is left."""
    if sys.platform == "win32":
        raise ConfigError("--jobs: several runs at a time are for Linux and macOS, and this is Windows: leave it out")
    theirs, ours = os.pipe()
    try:
        module = [sys.executable, "-m", "fedfleet.experiments.child", str(theirs), *command]
        with subprocess.Popen(
            module,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=[theirs],
        ) as process:
            yield process
    finally:
        os.close(theirs)
        os.close(ours)


def end_with(descriptor: int) -> None:
    """Send this process SIGTERM at the end of file of a pipe."""
    os.set_inheritable(descriptor, False)

    def watch() -> None:
        os.read(descriptor, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run a module as ``python -m`` does."""
    end_with(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
