"""A second objective of a task: the first one, of inputs that are scaled and shifted (FedRobust's affine distribution shifts).

It takes a tree with one part more, "shift": {"scale", "offset"}, which ascends: inputs x become scale * x + offset.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from fedfleet.simulator.author import Batch, Key, Objective, Tree

Shift = Literal["diagonal", "channel"]
"""A scale and an offset for each number of an input, or for each channel of images."""


def no_shift(example: tuple[int, ...], kind: Shift) -> Tree:
    """Return the shift that leaves inputs of a shape as they are."""
    shape = example if kind == "diagonal" or len(example) != 3 else (example[0], 1, 1)
    return {"shift": {"scale": torch.ones(shape), "offset": torch.zeros(shape)}}


def shifted(train: Objective) -> Objective:
    """Return the objective of shifted inputs."""

    def loss(z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Any, Any]:
        shift = z["shift"]
        x = (batch.x if batch.x.is_floating_point() else batch.x.float()) * shift["scale"] + shift["offset"]
        rest = {p: part for p, part in z.items() if p != "shift"}
        return train.loss(rest, Batch({**batch.data, "x": x}, batch.weight), ctx, key)

    return Objective(loss=loss, sign={**train.sign, "shift": -1})
