"""Start or join Ray, and let tensors travel by it."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.errors import FedfleetError, one_line
from fedfleet.simulator.executors.session import Session
from fedfleet.simulator.named import sent_whole
from fedfleet.simulator.signals import put_off

# An actor without a GPU keeps CUDA_VISIBLE_DEVICES as it is. Actors of a cluster of our own run at the priority of the driver,
# or whatever else the machine does would hold up every round; and to and from other machines, a model of a few MB goes with
# the call and comes back in the reply itself.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_max_direct_call_object_size", str(4 << 20))
import ray
import ray.exceptions as R  # noqa: F401
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode  # noqa: F401

dumps, loads = ray.cloudpickle.dumps, ray.cloudpickle.loads  # pyright: ignore[reportAttributeAccessIssue]

LOOPBACK = "127.0.0.1"
SAID = 300  # letters of what Ray says, at most
_sessions: list[Session] = []  # that of the Ray which this process has started, if any
DIRECT_BYTES = 4 << 20
"""What goes with a call, as above; under another limit results are the same, and come later."""

MODE = "RAY_AUTH_MODE"
TOKEN = f"; where it has a token, set {MODE}=token"  # which Ray does not say
# A private cluster is guarded by a token, as it should be; that this is so needs no line on the console of every run.
logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
    lambda record: not record.getMessage().startswith("Token authentication is enabled")
)


def start_ray(address: str | None, cpus: int | None) -> bool:
    """Start Ray on loopback, or join the cluster at ``address``; return whether that was still to do. Raises FedfleetError."""
    if ray.is_initialized():
        return False
    where: dict[str, Any] = {"address": address}
    ray_worker.print_to_stdstream = _say_nothing
    try:
        # An interruption in the middle would leave processes behind, or crash this one; and Ray's handlers end in an abort.
        with put_off(), _without_handlers(), _on_loopback() if address is None else nullcontext():
            if address is None:
                _sessions.append(_session())
                atexit.register(stop_ray)
                temporary = str(_sessions[-1].temporary)
                where = {"address": "local", "_node_ip_address": LOOPBACK, "num_cpus": cpus, "_temp_dir": temporary}
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **where)
    except FedfleetError:
        raise
    except ConnectionError as e:
        raise FedfleetError(
            f"executor.address={address!r}: no Ray cluster answers there ({one_line(e)}): start one with "
            f"`ray start --head`, or leave the address out{'' if os.environ.get(MODE) == 'token' else TOKEN}"
        ) from e
    except Exception as e:  # of any of the kinds that Ray's processes have for not coming up
        if isinstance(e, RuntimeError) and "mismatch" in str(e):
            raise FedfleetError(
                f"executor.address={address!r}: the cluster there has another Ray or Python ({one_line(e)}): give this environment "
                f"the cluster's"
            ) from e
        with suppress(Exception):  # what of it has come up
            stop_ray()
        where_to = "on this machine" if address is None else f"and join the cluster at executor.address={address!r}"
        raise FedfleetError(
            f"executor: Ray cannot start {where_to} ({type(e).__name__}: {one_line(e)[:SAID]}): mend that, or do without it: set "
            f"executor.kind=local, and for several runs jobs to 1"
        ) from e
    return True


def _session() -> Session:
    """Make a folder for a Ray of our own. Raises FedfleetError where none can be made."""
    try:
        return Session()
    except OSError as e:
        raise FedfleetError(
            f"executor: Ray needs a folder for its files, and none can be made ({one_line(e)}): set RAY_TMPDIR to one that you may "
            f"write to, of a short path"
        ) from None


def send_whole() -> None:
    """Have the code of modules that a configuration names travel with what refers to it, for workers' Python need not find them."""
    for module in sent_whole():
        ray.cloudpickle.register_pickle_by_value(module)  # pyright: ignore[reportAttributeAccessIssue]


def stop_ray(*, dead: bool = False) -> None:
    """Leave Ray, and stop what was started with it; of one that is ``dead`` also the raylet's agents, which wait for the GCS."""
    with put_off():
        agents = _children_of_raylet() if dead else []
        ray.shutdown()
        for agent in agents:
            with suppress(OSError):  # it has ended by itself
                signal.pidfd_send_signal(agent, signal.SIGKILL)
            os.close(agent)
        while _sessions:
            _sessions.pop().close()
        atexit.unregister(stop_ray)


def _children_of_raylet() -> list[int]:
    """Return descriptors of the processes that a raylet of ours has started; none where the system does not tell."""
    result: list[int] = []
    with suppress(AttributeError, LookupError, OSError, ValueError):
        raylet = ray_worker._global_node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid  # pyright: ignore
        for path in Path(f"/proc/{raylet}/task").glob("*/children"):
            result += [os.pidfd_open(int(pid)) for pid in path.read_text().split()]
    return result


def _say_nothing(data: Any, ignore_prefix: bool) -> None:
    """Take the place of what prints Ray's logs and errors, such as the state of a raylet that died: fedfleet tells of that."""


@contextmanager
def _without_handlers() -> Iterator[None]:
    """Have Ray leave SIGTERM to ``put_off``: its own handler would end its processes in the middle of their start."""
    before = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = before


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray take loopback for its address: elsewhere than on macOS and Windows it would put the machine's in its place."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


BITS = {1: torch.uint8, 2: torch.int16}
"""Integers of the size of floats that NumPy does not know, such as bfloat16."""


def to_numpy(t: Tensor) -> tuple[Any, torch.dtype]:
    """Return a tensor's values, or their bits where NumPy has no such type, and the type."""
    t = t.detach().cpu()
    known = not t.is_floating_point() or t.dtype in (torch.float16, torch.float32, torch.float64)
    return (t if known else t.view(BITS[t.dtype.itemsize])).numpy(), t.dtype


def from_numpy(sent: tuple[Any, torch.dtype]) -> Tensor:
    """Return the tensor of ``to_numpy``, which shares the memory of the array."""
    values, dtype = sent
    return torch.from_numpy(values).view(dtype)


def share_tensors() -> None:
    """Send tensors as NumPy buffers, which Ray maps into the receiver without copying. Applies to what this process sends."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    ray.util.register_serializer(  # pyright: ignore[reportAttributeAccessIssue]
        Tensor, serializer=to_numpy, deserializer=from_numpy
    )
