"""Options that tasks share: what a user may write under ``task:`` in a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from fedfleet.simulator.registry import Options

Width = Annotated[int, Field(ge=1)]
"""Of a layer."""


class DataShape(NamedTuple):
    """What a task must know of its data: the shape of one example, the number of classes, and of texts that of tokens, else 0."""

    example: tuple[int, ...]
    classes: int
    words: int = 0


class ModelOptions(Options):
    """Which net."""

    model: str = "mlp"
    """One of logistic, mlp, cnn, cnn_bn, lenet, lenet_relu, lenet_sigmoid, convnet."""
    hidden: tuple[Width, ...] = (64,)
    """Widths of the hidden layers (mlp only)."""
    init: Literal["drawn", "zero"] = "drawn"
    """What parameters begin as: drawn from the seed, or 0, for a net that is one linear layer; units of others would stay alike."""
