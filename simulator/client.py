"""The work of one client as a function from tensors to tensors, so that it can be run alone or mapped over many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator import rng
from fedfleet.simulator import tree as T
from fedfleet.simulator.batches import Schedule
from fedfleet.simulator.gradient import EngineOps
from fedfleet.simulator.population import gather
from fedfleet.simulator.tree import Tree
from fedfleet.simulator.work import At, Batch, Phase, Stage


class ClientInputs:
    """What differs between the clients of a block, stacked (first axis C) as flat tensors.

    Attributes:
        tensors: keys, counts, the fields of a ``Schedule`` a stage, then the leaves of ``own`` and of ``inbox``.
        own, inbox: trees that give the structure of the last two.
        stages: number of stages.

    """

    def __init__(self, keys: Tensor, counts: Tensor, walks: list[Schedule], own: Tree, inbox: Tree):
        self.own, self.inbox, self.stages = own, inbox, len(walks)
        self.tensors = (keys, counts, *(t for w in walks for t in w), *T.leaves(own), *T.leaves(inbox))

    def unpack(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, list[Schedule], Tree, Tree]:
        """Return (key, count, walks, own, inbox) of one client from its slices of ``tensors``."""
        key, count, *rest = tensors
        width = len(Schedule._fields)
        walks = [Schedule(*rest[width * s : width * (s + 1)]) for s in range(self.stages)]
        trees = T.unflatten((self.own, self.inbox), rest[width * self.stages :])
        return key, count, walks, *trees


class ClientProgram:
    """One client's phase, callable on its slices of ``ClientInputs.tensors``.

    After a call, ``structure`` unflattens what it returned: ``{"send", "config", "own", "steps", "loss"}``, and ``where``
    names the last step it was in (for error messages).
    """

    def __init__(
        self,
        phase: Phase,
        inputs: ClientInputs,
        shared: Mapping[str, Any],
        data: Mapping[str, Tensor],
        setup: Any,
        always: list[list[bool]],
    ):
        self.phase, self.inputs, self.shared, self.data, self.setup = phase, inputs, shared, data, setup
        self.always = always  # per stage and step: whether all clients of the block take it, so that no mask is needed
        self.structure: Tree = None
        self.where = "begin"

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run begin, every step of every stage, finish."""
        key, count, walks, own, inbox = self.inputs.unpack(tensors)
        work, shared = self.phase.work, self.shared
        self.where = "begin"
        carry = work.begin(shared, own, inbox, key)
        loss, measured = torch.zeros((), device=count.device), torch.zeros((), device=count.device)
        done = torch.zeros((), dtype=torch.int64, device=count.device)
        for s, (stage, walk) in enumerate(zip(work.stages, walks, strict=True)):
            for k, step in enumerate(map(Schedule._make, zip(*(field.unbind(0) for field in walk), strict=True))):
                self.where = f"stage {s}, step {k}"
                new, step_loss = self._step(stage, step, k, carry, count)
                carry = new if self.always[s][k] else T.where(step.active, new, carry)
                done = done + step.active
                if step_loss is not None:
                    loss = loss + torch.where(step.active, step_loss, torch.zeros_like(step_loss))
                    measured = measured + step.active
        self.where = "finish"
        message, own = work.finish(shared, own, inbox, carry)
        send = message.send
        for i, transform in enumerate(self.phase.uplink):
            send = transform(send, rng.fold(key, "uplink", i))
        config = {k: torch.as_tensor(v, dtype=torch.float64, device=count.device) for k, v in message.config.items()}
        out = {"send": dict(send), "config": config, "own": own, "steps": done, "loss": loss / measured}
        self.structure = T.map(lambda _: 0, out)
        return tuple(T.leaves(out))

    def _step(self, stage: Stage, at: Schedule, k: int, carry: Tree, count: Tensor) -> tuple[Tree, Tensor | None]:
        """Run one step; return the new carry and the training loss, None where the step took no gradient."""
        batch: Any = Batch(gather(self.data, at.rows), at.weight)
        if stage.batches.per_step > 1:
            batch = batch.split(stage.batches.per_step)
        ops = EngineOps(self.setup.objectives, self.setup.functions)
        new = stage.step(ops, self.shared, carry, batch, At(k, at.epoch, at.epoch_end, count), at.key)
        return new, ops.loss
