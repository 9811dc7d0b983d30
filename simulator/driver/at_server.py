"""What the server works at itself, on examples of its own, as one of its clients would."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedfleet.simulator.algorithm import Done
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import run_at_server
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.work import Message, Phase


def at_server(
    executor: Executor, phase: Phase, shared: Message, own: Tree, key: Key, steps: int | None, faults: Faults
) -> Done:
    """Return what a phase comes to whose one client, number 0 of its own population, is the server. Raises ClientError.

    It is a block like any other: the executor's workers do it, with draws of ``key``. Of ``faults`` it cannot be dropped.
    """
    if own is None and phase.own is not None:
        own = phase.own(shared.merged())
    alone = torch.zeros(1, dtype=torch.int64)
    task = BlockTask(
        phase=phase.name,
        clients=alone,
        copies=alone,
        key=key,
        steps=steps,
        own=None if own is None else T.map(lambda leaf: leaf[None], own),
        faults=Faults(non_finite="keep" if faults.non_finite == "keep" else "fail"),
    )
    try:
        (found,) = executor.map(run_at_server, replace(shared, size=None), [task])
    except ClientError as e:
        raise type(e)(f"the server's own work: {e.told()}") from e.__cause__
    values = {slot: r.final(found.partials[slot]) for slot, r in phase.reduce.items()}
    return Done(values, None if found.own is None else T.index(found.own, 0))
