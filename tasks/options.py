"""Options that tasks share: what a user may write under ``task:`` in a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from fedfleet.simulator.registry import Options

Width = Annotated[int, Field(ge=1)]
"""Of a layer."""


class DataShape(NamedTuple):
    """What a task must know of its data: the shape of one example, the number of classes, and of texts that of tokens, else 0."""

    example: tuple[int, ...]
    classes: int
    words: int = 0


class AdapterOptions(Options):
    """Layers that have adapters, and their kind."""

    rank: Width = 8
    """r, of every adapter; below the sizes of its layer."""
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    """Factor of an adapter, over r."""
    scaling: Literal["lora", "rslora"] = "lora"
    """lora: by alpha / r; rslora: by alpha / √r."""
    targets: list[str] | None = Field(default=None, min_length=1)
    """Names of linear layers, or how they end after a dot; if not given, every linear layer but the last one."""
    full: list[str] | None = None
    """Names of layers, or how they end, that are learnt whole; if not given, none but the new head of a transformer that
    classifies."""
    learn: Literal["both", "B"] = "both"
    """Both matrices of an adapter, or B alone (FFA-LoRA)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that training leaves out."""
    base: str | None = None
    """File with the weights that stay as they are: a run's ``model.safetensors`` or a state_dict, in .safetensors or .pt; if not
    given, those that the net is made with, at seed 0."""
    digest: str | None = None
    """SHA-256 of the net without adapters; a run says here what it was."""

    @property
    def scale(self) -> float:
        """Return s."""
        return self.alpha / (self.rank if self.scaling == "lora" else math.sqrt(self.rank))


class Net(NamedTuple):
    """The net that a task's options name.

    Attributes:
        model: its name; None for a task of no net, or of one that is always the same.
        adapters: the options of the adapters that it learns, if any.
        paths: code of authors that the task names, ``module:name`` by the option's key.

    """

    model: str | None = None
    adapters: AdapterOptions | None = None
    paths: Mapping[str, str] = {}


class TaskOptions(Options):
    """Options of a task, and what is asked of any before a run."""

    texts: ClassVar[bool] = False
    """Whether it reads texts."""

    def net(self) -> Net:
        """Return the net that they name."""
        return Net()


def named_net(options: Options) -> Net:
    """Return the net that the options of a task name; an author's own task, or one made in Python, names none."""
    return options.net() if isinstance(options, TaskOptions) else Net()


class ModelOptions(TaskOptions):
    """Which net."""

    model: str = "mlp"
    """One of logistic, mlp, cnn, cnn_bn, lenet, lenet_relu, lenet_sigmoid, convnet, cnn5."""
    hidden: tuple[Width, ...] = (64,)
    """Widths of the hidden layers (mlp only)."""
    init: Literal["drawn", "zero"] = "drawn"
    """What parameters begin as: drawn from the seed, or 0, for a net that is one linear layer; units of others would stay alike."""

    def net(self) -> Net:
        """Return the net that they name."""
        return Net(self.model)
