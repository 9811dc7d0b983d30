"""Run blocks on a pool of Ray actors, each hosting as many virtual clients as come its way."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import tree as T
from fedfleet.simulator.block import Setup
from fedfleet.simulator.errors import ClientError, FedfleetError, one_line
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.worker import prepare
from fedfleet.simulator.work import Message

# An actor without a GPU keeps CUDA_VISIBLE_DEVICES as it is. Actors of a cluster of our own run at the priority of the driver,
# or whatever else the machine does would hold up every round; and a model of a few MB comes back in the reply itself.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_max_direct_call_object_size", str(4 << 20))
import ray
from ray.exceptions import RayActorError

# A private cluster is guarded by a token, as it should be; that this is so needs no line on the console of every run.
logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
    lambda record: not record.getMessage().startswith("Token authentication is enabled")
)

IN_FLIGHT = 2  # blocks an actor has at hand, so that it never waits for the driver
# Shared trees up to here travel with each task, which is faster than a look into the object store.
INLINE_BYTES = 1 << 16
AHEAD = 64  # blocks dispatched beyond the merge front, which bounds the driver's memory


def start_ray(address: str | None, cpus: int | None) -> bool:
    """Start Ray on loopback, or join the cluster at ``address``; return whether that was still to do. Raises FedfleetError."""
    if ray.is_initialized():
        return False
    where: dict[str, Any] = {"address": address}
    if address is None:
        where = {"address": "local", "_node_ip_address": "127.0.0.1", "num_cpus": cpus}
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **where)
    except ConnectionError as e:
        raise FedfleetError(
            f"executor.address={address!r}: no Ray cluster answers there ({one_line(e)}): start one with "
            f"`ray start --head`, or leave the address out"
        ) from e
    if callable(on_term) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_term)  # Ray's own handlers end in an abort
    return True


def share_tensors() -> None:
    """Send tensors as NumPy buffers, which Ray maps into the receiver without copying. Applies to what this process sends."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    ray.util.register_serializer(  # pyright: ignore[reportAttributeAccessIssue]
        Tensor, serializer=lambda t: t.detach().cpu().numpy(), deserializer=torch.from_numpy
    )


class ClientActor:
    """A worker process that runs blocks of clients."""

    def __init__(self, setup: list[Any], threads: int):
        share_tensors()
        prepare(threads)
        found: Setup = ray.get(setup[0])
        self._setup = found.placed()

    def ready(self) -> None:
        """Return once the actor is up."""

    def run(self, job: Job, shared: Message, task: Any) -> tuple[Any, str | None]:
        """Return ``(result, None)``, or ``(None, message)`` where client code is at fault."""
        try:
            return job(self._setup, shared, task), None
        except ClientError as e:
            cause = e.__cause__
            detail = "" if cause is None else "\n" + _traceback(cause)
            return None, f"{e}{detail}"


def _traceback(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)).rstrip()


class _Batch:
    """The tasks of one call of ``map``: those that wait, and references to the results of those that are done."""

    def __init__(self, job: Job, shared: Any, tasks: Iterable[Any], background: bool):
        self.job, self.shared, self.background = job, shared, background
        self.waiting = deque(enumerate(tasks))
        self.size, self.front = len(self.waiting), 0
        self.done: dict[int, Any] = {}

    @property
    def ready(self) -> bool:
        """Whether a task waits that is not too far ahead of the merge front."""
        return bool(self.waiting) and self.waiting[0][0] - self.front < AHEAD


class RayExecutor:
    """A pool of ``ClientActor``s. Results come back in task order, so the number of actors never changes a bit."""

    def __init__(
        self,
        actors: int,
        cpus_per_actor: float = 1.0,
        gpus_per_actor: float = 0.0,
        threads: int = 1,
        address: str | None = None,
        cpus: int | None = None,
    ):
        self.actors, self.cpus, self.gpus, self.threads = actors, cpus_per_actor, gpus_per_actor, threads
        self._address, self._node_cpus = address, cpus
        self._pool: list[Any] = []
        self._batches: list[_Batch] = []
        self._running: dict[Any, tuple[_Batch, int, int]] = {}
        self._load: list[int] = []
        self._started_ray = False

    def start(self, setup: Setup) -> None:
        """Start Ray (on loopback, unless an address is given), put the setup once, and bring the actors up."""
        torch.set_num_threads(1)
        self._started_ray = start_ray(self._address, self._node_cpus)
        share_tensors()
        remote = ray.remote(ClientActor).options(num_cpus=self.cpus, num_gpus=self.gpus)  # pyright: ignore
        self._reference = ray.put(setup)
        self._pool = [remote.remote([self._reference], self.threads) for _ in range(self.actors)]
        self._load = [0] * self.actors
        self._get([a.ready.remote() for a in self._pool])

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], *, background: bool = False) -> Iterator[Any]:
        """Put the shared trees once (small ones go along with each task) and start; yield results in task order.

        Tasks in the background run where no others wait.
        """
        small = T.num_bytes(dict(shared.send)) <= INLINE_BYTES
        batch = _Batch(job, shared if small else ray.put(shared), tasks, background)
        self._batches = sorted([*self._batches, batch], key=lambda b: b.background)
        self._dispatch()
        return self._results(batch)

    def _results(self, batch: _Batch) -> Iterator[Any]:
        try:
            while batch.front < batch.size:
                while batch.front not in batch.done:
                    self._receive()
                    self._dispatch()
                result, fault = self._get(batch.done.pop(batch.front))
                batch.front += 1
                self._dispatch()
                if fault is not None:
                    raise ClientError(fault)
                yield result
        finally:
            self._batches = [b for b in self._batches if b is not batch]

    def _dispatch(self) -> None:
        """Give every actor that has room its next task."""
        for batch in self._batches:
            while batch.ready and min(self._load) < IN_FLIGHT:
                number, task = batch.waiting.popleft()
                actor = self._load.index(min(self._load))
                self._load[actor] += 1
                self._running[self._pool[actor].run.remote(batch.job, batch.shared, task)] = (batch, number, actor)

    def _receive(self) -> None:
        """Wait for a task to end."""
        ready, _ = ray.wait(list(self._running), num_returns=1)
        batch, number, actor = self._running.pop(ready[0])
        self._load[actor] -= 1
        batch.done[number] = ready[0]

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayActorError as e:
            raise FedfleetError(
                f"executor: a Ray actor died ({str(e).splitlines()[0]}): if memory ran out, lower executor.actors or "
                f"executor.block_size"
            ) from e

    def close(self) -> None:
        """Stop the actors, and Ray if this executor started it."""
        for actor in self._pool:
            ray.kill(actor)
        self._pool, self._batches, self._running = [], [], {}
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False
