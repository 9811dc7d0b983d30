"""The server's own work, on examples of its own, as one of its clients would do it."""

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
    executor: Executor, phase: Phase, shared: Message, client_state: Tree, key: Key, steps: int | None, faults: Faults
) -> Done:
    """Return what a phase comes to whose one client, number 0 of its own population, is the server. Raises ClientError.

    It is a block like any other: the executor's workers do it, with draws of ``key``. Of ``faults`` it cannot be dropped.
    """
    if client_state is None and phase.client_state is not None:
        client_state = phase.client_state(shared.merged())
    alone = torch.zeros(1, dtype=torch.int64)
    task = BlockTask(
        phase=phase.name,
        clients=alone,
        copies=alone,
        key=key,
        steps=steps,
        client_state=None if client_state is None else T.map(lambda leaf: leaf[None], client_state),
        faults=Faults(non_finite="keep" if faults.non_finite == "keep" else "fail"),
    )
    try:
        (result,) = executor.map(run_at_server, replace(shared, size=None), [task])
    except ClientError as e:
        raise type(e)(f"the server's own work: {e.told()}") from e.__cause__
    values = {slot: r.final(result.partials[slot]) for slot, r in phase.reduce.items()}
    return Done(values, None if result.client_state is None else T.index(result.client_state, 0))
