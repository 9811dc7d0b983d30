"""How Ray is started or joined, and how tensors travel."""

from __future__ import annotations

import logging
import os
import socket
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.errors import FedfleetError, one_line
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
from ray._private import worker as ray_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode  # noqa: F401

dumps, loads = ray.cloudpickle.dumps, ray.cloudpickle.loads  # pyright: ignore[reportAttributeAccessIssue]

LOOPBACK = "127.0.0.1"
PEER = struct.Struct("3i")  # what Linux says of the other end: process, user, group
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
    if address is None:
        where = {"address": "local", "_node_ip_address": LOOPBACK, "num_cpus": cpus}
    ray_worker.print_to_stdstream = _say_nothing
    try:
        # An interruption in the middle would leave processes behind, or crash this one; and Ray's handlers end in an abort.
        with put_off(), _on_loopback() if address is None else nullcontext():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **where)
    except ConnectionError as e:
        raise FedfleetError(
            f"executor.address={address!r}: no Ray cluster answers there ({one_line(e)}): start one with "
            f"`ray start --head`, or leave the address out{'' if os.environ.get(MODE) == 'token' else TOKEN}"
        ) from e
    except RuntimeError as e:
        if "mismatch" not in str(e):
            raise
        raise FedfleetError(
            f"executor.address={address!r}: the cluster there has another Ray or Python ({one_line(e)}): give this environment the "
            f"cluster's"
        ) from e
    return True


def send_whole() -> None:
    """Have the code of modules that a configuration names travel with what refers to it, for workers' Python need not find them."""
    for module in sent_whole():
        ray.cloudpickle.register_pickle_by_value(module)  # pyright: ignore[reportAttributeAccessIssue]


def stop_ray() -> None:
    """Leave Ray, and stop what was started with it."""
    with put_off():
        ray.shutdown()


def raylet() -> int | None:
    """Return a descriptor that can be waited for: it is ready once the raylet of this machine, started or joined, is dead.

    Some seconds later Ray ends this process without a word. None where the system has no such descriptors.
    """
    with suppress(AttributeError, LookupError, OSError):
        node: Any = ray_worker._global_node
        processes = node.all_processes.get(ray_constants.PROCESS_TYPE_RAYLET)
        if processes:
            return os.pidfd_open(processes[0].process.pid)
        return os.pidfd_open(_listener(node.raylet_socket_name))
    return None


def _listener(path: str) -> int:
    """Return the number of the process that listens on a socket of this machine."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        return PEER.unpack(asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0]


def _say_nothing(data: Any, ignore_prefix: bool) -> None:
    """Take the place of what prints Ray's logs and errors, such as the state of a raylet that died: fedfleet tells of that."""


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
