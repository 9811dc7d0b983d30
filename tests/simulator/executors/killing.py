"""Helpers of tests of dying workers; they go to the workers by value, since these cannot import tests."""

import os
import signal
import sys
from pathlib import Path

import ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

KILLED = "its process was killed or crashed, as where memory runs out"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def once(path: Path) -> bool:
    """Say whether nobody else has been here, in any process."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
