"""Measure a model: on the server's splits in fixed chunks, and on every client's own data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import rng
from fedfleet.simulator import tree as T
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.block import BlockTask, Chunk, run_block, run_chunk
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.faults import Faults
from fedfleet.simulator.reduction import Store, merge
from fedfleet.simulator.rng import Key
from fedfleet.simulator.tree import Tree
from fedfleet.simulator.work import At, Batch, BatchPlan, LocalWork, Message, Ops, Phase, Stage

CHUNK = 500  # fixed, since the chunk decides the bits
CLIENTS_A_BLOCK = 32


class Measurement:
    """A model under evaluation, chunk by chunk while the next round runs, if the executor has workers."""

    def __init__(self, executor: Executor, task: Task, z: Tree, data: Mapping[str, Mapping[str, Tensor]]):
        self._task, self._data = task, data
        self._outputs = {split: self._start(executor, z, split) for split in data}

    def _start(self, executor: Executor, z: Tree, split: str) -> Iterator[Any]:
        size = len(next(iter(self._data[split].values())))
        chunks = [Chunk("predict", split, i, min(i + CHUNK, size)) for i in range(0, size, CHUNK)]
        return executor.map(run_chunk, Message(send={"z": z}), chunks, background=True)

    def result(self) -> dict[str, float]:
        """Return the task's metrics on every split; those of the split "test" have no prefix. To be called once."""
        found: dict[str, float] = {}
        for split, outputs in self._outputs.items():
            prefix = "" if split == "test" else f"{split}_"
            metrics = self._task.metrics(T.concat(list(outputs)), self._data[split])
            found |= {f"{prefix}{name}": value for name, value in metrics.items()}
        return found


def client_phase(metrics: tuple[str, ...]) -> Phase:
    """Return the phase that averages the task's "per_example" metrics over each client's own data."""

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Tree:
        return {name: torch.zeros((), device=key.device) for name in metrics}

    def step(ops: Ops, shared: Mapping[str, Any], total: Tree, batch: Batch, at: At, key: Key) -> Tree:
        each = ops.apply("per_example", shared["z"], batch)
        share = batch.count() / at.num_examples
        return {name: total[name] + share * batch.mean(each[name]) for name in metrics}

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, total: Tree) -> tuple[Message, Tree]:
        return Message(send={"metrics": total}), own

    everything = BatchPlan(size=CHUNK, epochs=1, shuffle=False)
    work = LocalWork(begin=begin, stages=(Stage(step=step, batches=everything),), finish=finish)
    return Phase(name="client_metrics", work=work, reduce={"metrics": Store()})


def evaluate_clients(executor: Executor, z: Tree, clients: int) -> dict[str, Tensor]:
    """Return each client's metrics (N,) at ``z``, finite or not; the setup must hold ``client_phase``."""
    ids = torch.arange(clients)
    key = rng.key(0)  # nothing is drawn
    faults = Faults(non_finite="keep")
    tasks = [
        BlockTask("client_metrics", c, torch.zeros_like(c), key, faults=faults) for c in ids.split(CLIENTS_A_BLOCK)
    ]
    stored = None
    for result in executor.map(run_block, Message(send={"z": z}), tasks):
        stored = merge(Store(), stored, result.partials["metrics"])
    assert stored is not None
    return T.concat(stored.blocks)
