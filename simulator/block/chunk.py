"""Evaluate a model on a slice of a split, on the server's side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.side_effects import SideEffects
from fedfleet.simulator.errors import ClientError, one_line
from fedfleet.simulator.population import gather
from fedfleet.simulator.signals import contained
from fedfleet.simulator.work import Batch, Message

TRIED = 16  # rows on which a function is tried before its first chunk


class Chunk(NamedTuple):
    """A fixed slice of an evaluation split; ``whole`` if it is to be all of it, so that a few rows cannot be tried first."""

    function: str
    split: str
    start: int
    stop: int
    whole: bool = False


def run_chunk(setup: Setup, shared: Message, task: Chunk) -> Tree:
    """Evaluate ``functions[task.function]`` at the model ``shared.send["z"]`` on a chunk of an evaluation split.

    Raises ClientError where the function raises, draws from torch's generator, or writes into what it has not made.
    """
    device = torch.device(setup.device)
    z = T.to(T.as_new(shared.send["z"]), device)

    def batch(start: int, stop: int) -> Batch:
        data = gather(setup.evaluation[task.split], torch.arange(start, stop))
        return Batch({k: v.to(device) for k, v in data.items()}, torch.ones(stop - start, device=device))

    given, who = batch(task.start, task.stop), f"the task's {task.function!r}"

    def function(z: Tree, given: Batch) -> Tree:
        with contained():
            return setup.functions[task.function](z, given)

    with torch.no_grad():
        pure = SideEffects(who, {"z": z}, {"batch": dict(given.data)}, setup.tensors)
        if not task.whole and setup.held.first(who):
            pure.trial(lambda: function(z, batch(task.start, min(task.stop, task.start + TRIED))), holds=setup.authors)
        try:
            result = T.to(function(z, given), "cpu")
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            about = ", ".join(
                f"{k} {tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for k, v in given.data.items()
            )
            raise ClientError(f"{who}, on the split {task.split!r} ({about}): {type(e).__name__}: {one_line(e)}") from e
    pure.check()
    return result
