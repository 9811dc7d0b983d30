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

from fedfleet.simulator.block import Setup
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.simulator.executors.base import Job
from fedfleet.simulator.executors.worker import prepare
from fedfleet.simulator.work import Message

os.environ.setdefault(
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
)  # an actor without a GPU keeps CUDA_VISIBLE_DEVICES as it is
import ray
from ray.exceptions import RayActorError

# A private cluster is guarded by a token, as it should be; that this is so needs no line on the console of every run.
logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(
    lambda record: not record.getMessage().startswith("Token authentication is enabled")
)

IN_FLIGHT = 2  # blocks an actor has at hand, so that it never waits for the driver
AHEAD = 64  # blocks dispatched beyond the merge front, which bounds the driver's memory


def _share_tensors() -> None:
    """Send tensors as NumPy buffers, which Ray maps into the receiver without copying. Applies to what this process sends."""
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    ray.util.register_serializer(  # pyright: ignore[reportAttributeAccessIssue]
        Tensor, serializer=lambda t: t.detach().cpu().numpy(), deserializer=torch.from_numpy
    )


class ClientActor:
    """A worker process that runs blocks of clients."""

    def __init__(self, setup: list[Any], threads: int):
        _share_tensors()
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
        self._started_ray = False

    def start(self, setup: Setup) -> None:
        """Start Ray (on loopback, unless an address is given), put the setup once, and bring the actors up."""
        torch.set_num_threads(1)
        if not ray.is_initialized():
            where: dict[str, Any] = {"address": self._address}
            if self._address is None:
                where = {"address": "local", "_node_ip_address": "127.0.0.1", "num_cpus": self._node_cpus}
            on_term = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **where)
            except ConnectionError as e:
                raise FedfleetError(
                    f"executor.address={self._address!r}: no Ray cluster answers there ({' '.join(str(e).split())}): start one "
                    f"with `ray start --head`, or leave the address out"
                ) from e
            self._started_ray = True
            if callable(on_term) and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_term)  # Ray's own handlers end in an abort
        _share_tensors()
        remote = ray.remote(ClientActor).options(num_cpus=self.cpus, num_gpus=self.gpus)  # pyright: ignore
        self._reference = ray.put(setup)
        self._pool = [remote.remote([self._reference], self.threads) for _ in range(self.actors)]
        self._get([a.ready.remote() for a in self._pool])

    def map(self, job: Job, shared: Message, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield results in task order; the shared trees are put once."""
        reference = ray.put(shared)
        waiting = deque(enumerate(tasks))
        load = dict.fromkeys(range(len(self._pool)), 0)
        running: dict[Any, tuple[int, int]] = {}
        done: dict[int, Any] = {}
        front = 0
        while waiting or running or done:
            while waiting and waiting[0][0] - front < AHEAD and min(load.values()) < IN_FLIGHT:
                actor = min(load, key=lambda a: (load[a], a))
                number, task = waiting.popleft()
                running[self._pool[actor].run.remote(job, reference, task)] = (number, actor)
                load[actor] += 1
            if running:
                ready, _ = ray.wait(list(running), num_returns=1)
                number, actor = running.pop(ready[0])
                load[actor] -= 1
                result, fault = self._get(ready[0])
                if fault is not None:
                    raise ClientError(fault)
                done[number] = result
            while front in done:
                yield done.pop(front)
                front += 1

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
        self._pool = []
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False
