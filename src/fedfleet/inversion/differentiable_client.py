"""A differentiable client: what it would send, as a function of its examples, by its own code, step by step.

Whoever knows a client's code, what it was sent and how many examples it has can compute this for made-up examples.
Source: Geiping, Bauermeister, Dröge & Moeller, "Inverting gradients: how easy is it to break privacy in federated
learning?", NeurIPS 2020. What the client draws, such as the order of its examples, is taken to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.batches import BatchSchedule, walked
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.block.uplink import through
from fedfleet.simulator.population import LocalData, gather
from fedfleet.simulator.work import Batch, Message, Phase, StepInfo, Transform

Upload = Callable[[Tensor, Tensor], Mapping[str, Tree]]
"""Examples (n, ...) and labels (n,) -> slots that a client would send."""


class TracedOps(EngineOps):
    """Ops for one client alone, whose gradients can be differentiated in turn."""

    def grad(
        self, objective: str, z: Tree, batch: Batch, key: Key, *, ctx: Tree = None, wrt: tuple[str, ...] | None = None
    ) -> tuple[Tree, Mapping[str, Any]]:
        """Return ``(direction, aux)``, as the engine does. Raises ValueError where players have losses of their own."""
        chosen = self._objective(objective)
        moving = {p: z[p] for p in z if chosen.sign.get(p, 0) != 0 and (wrt is None or p in wrt)}

        def loss(moving: Tree) -> tuple[Tensor, Mapping[str, Any]]:
            value, aux = chosen.loss({**z, **moving}, batch, ctx, key)
            if isinstance(value, Mapping):
                raise ValueError("players have losses of their own")
            return value, {**aux, "loss": value}

        result, aux = torch.func.grad(loss, has_aux=True)(moving)
        return {p: T.scale(chosen.sign[p], result[p]) if p in result else T.zeros_like(z[p]) for p in z}, aux


def differentiable_client(
    phase: Phase,
    task: Task,
    shared: Message,
    client_input: Tree,
    examples: int,
    key: Key,
    uplink: tuple[Transform, ...] = (),
    steps: int | None = None,
    limit: int | None = None,
) -> Upload:
    """Return what one client sends, of its examples; it keeps no state.

    Args:
        phase: whose work it is.
        task: whose objectives it takes gradients of.
        shared: what all clients were sent, in the type that is computed in.
        client_input: what it was sent alone.
        examples: n.
        key: the client's in this exchange, of what it draws.
        uplink: transforms on the way that can be differentiated.
        steps: replaces the steps of its batch plans.
        limit: steps after which it stops.

    """
    count, given, work = torch.tensor([examples]), shared.merged(), phase.work
    rows = LocalData({}, torch.arange(examples)[None], count, torch.zeros(1, dtype=torch.int64))
    walks = walked(phase, rows, key[None], steps, None if limit is None else torch.tensor([limit]))
    first = rng.fold(key, "begin")

    def upload(x: Tensor, y: Tensor) -> Mapping[str, Tree]:
        carry = work.client_init(given, None, client_input, first)
        for stage, schedule in zip(work.loops, walks, strict=True):
            for k, at in enumerate(map(BatchSchedule._make, zip(*(field[0] for field in schedule), strict=True))):
                whole = Batch(gather({"x": x, "y": y}, at.rows), at.weight.to(x.dtype))
                batch: Any = whole.split(stage.batches.per_step) if stage.batches.per_step > 1 else whole
                where = StepInfo(k, at.epoch, at.epoch_end, count[0])
                carry = stage.step(TracedOps(task.objectives, task.functions), given, carry, batch, where, at.key)
        send = work.client_final(given, None, client_input, carry)[0].send
        return through(uplink, send, given, None, key).send if uplink else send

    return upload
