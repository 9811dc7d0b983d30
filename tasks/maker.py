"""Makers of nets of one's own: from a function or class that is named or given, or from a net that is given.

A maker is called with torch's generator at the seed. So its initial weights are a function of the run's seed, as
those of the built-in nets are. It gets ``seed``, ``shape`` (of one example) and ``classes`` where it names them. A
net that is given begins with the weights it has, whatever the seed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.named import called, found, parameters
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.pretrained import BATCH_NORMS, Norm, with_norm

TORCHVISION = "torchvision.models"
"""The module whose nets take ``num_classes`` without naming it in their signatures."""


@dataclass(frozen=True)
class Maker:
    """Makes one net, the same for the same seed; ``said`` and ``key`` name it, and its arguments, in messages.

    ``norm`` is what its BatchNorms are replaced by, "batch" for nothing; ``filled`` are arguments that the data say where
    nobody else does.
    """

    make: Callable[..., Any] | nn.Module
    said: str
    key: str = "arguments"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    offered: Mapping[str, Any] = field(default_factory=dict)
    norm: Norm = "batch"
    filled: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, seed: int) -> nn.Module:
        """Return a new net in its training mode. Raises ConfigError where that fails, or what is made is none that could learn."""
        if isinstance(self.make, nn.Module):
            return self._checked(copy.deepcopy(self.make))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                given = {**self.filled, **self.arguments}
                made = called(self.said, self.key, self.make, given, seed=seed, **self.offered)
            except (ConfigError, torch.OutOfMemoryError):
                raise
            except Exception as e:
                raise ConfigError(
                    f"{self.said}: {self.name} raised {type(e).__name__} ({one_line(e)}): mend it, or call it with other arguments"
                ) from e
        return self._checked(made)

    @property
    def name(self) -> str:
        """Return what is made, or makes it, by its name."""
        return getattr(self.make, "__name__", type(self.make).__name__)

    def code(self) -> tuple[str, str] | None:
        """Return in Python where what makes the net is from, and the call; None for what has no name, and for other layers."""
        f = self.make
        if self.norm != "batch" or not isinstance(f, type | FunctionType) or f.__qualname__ != f.__name__:
            return None
        if f.__name__ == "<lambda>" or f.__module__.startswith("fedfleet."):
            return None
        takes = parameters(f)
        offered = {name: value for name, value in {"seed": 0, **self.offered}.items() if name in takes}
        given = ", ".join(f"{k}={v!r}" for k, v in {**offered, **self.filled, **self.arguments}.items())
        of = f"# {self.name} is yours" if f.__module__ == "__main__" else f"from {f.__module__} import {self.name}"
        return of, f"{self.name}({given})"

    def _checked(self, net: Any) -> nn.Module:
        if not isinstance(net, nn.Module):
            raise ConfigError(f"{self.said}: {self.name} returned a {type(net).__name__}: return a torch.nn.Module")
        if isinstance(net, ScriptModule):
            raise ConfigError(f"{self.said}: it is compiled by torch.jit: give the net that was compiled")
        if lazy := [name for name, t in (*net.named_parameters(), *net.named_buffers()) if is_lazy(t)]:
            raise ConfigError(
                f"{self.said}: {lazy[0]!r} has no shape yet: give its layer the size of its inputs, not a lazy one"
            )
        if not any(p.requires_grad for p in net.parameters()):
            raise ConfigError(
                f"{self.said}: it has no parameters to learn: give it a layer that has, with requires_grad"
            )
        for layer in net.modules():
            if not net.training or type(layer).train is not nn.Module.train:
                layer.train()  # which may leave a part of it in eval mode
        return self._normalised(net)

    def _normalised(self, net: nn.Module) -> nn.Module:
        if self.norm == "batch":
            return net
        if not any(isinstance(layer, BATCH_NORMS) for layer in net.modules()):
            raise ConfigError(f"norm={self.norm} is not for {self.said}, which has no BatchNorm: leave it out")
        try:
            return with_norm(net, self.norm)
        except ValueError as e:
            raise ConfigError(f"norm={self.norm}, {self.said}: {e}") from None


def of_path(
    text: str, arguments: Mapping[str, Any] | None, shape: DataShape, key: str = "task", norm: Norm = "batch"
) -> Maker:
    """Return the maker that a ``module:name`` is. Raises ConfigError.

    A net of torchvision gets as many outputs as the data have classes, where nothing else is said: what has ``weights`` from
    elsewhere has outputs, too.
    """
    offered: dict[str, Any] = {"shape": tuple(shape.example)}
    offered |= {name: number for name, number in shape._asdict().items() if name in ("classes", "words") and number}
    make = found(f"{key}.model", text)
    given, library = dict(arguments or {}), text.partition(":")[0] == TORCHVISION
    filled = {"num_classes": shape.classes} if library and shape.classes and given.get("weights") is None else {}
    filled = {name: value for name, value in filled.items() if name not in given}
    return Maker(make, f"{key}.model={text!r}", f"{key}.arguments", given, offered, norm, filled)
