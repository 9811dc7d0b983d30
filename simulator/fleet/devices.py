"""Devices, which say how long the work of a phase takes on a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key


class Load(NamedTuple):
    """What a phase asks of each invited client.

    Attributes:
        steps, examples: (S,) int64, local steps and the examples that pass through them.
        bytes_down, bytes_up: of one client's messages, or (S,) of each; those up as far as they are known before they are sent.
        flop: floating-point operations for one of the examples.

    """

    steps: Tensor
    examples: Tensor
    bytes_down: float | Tensor = 0.0
    bytes_up: float = 0.0
    flop: float = 0.0


class Times(NamedTuple):
    """Virtual seconds (S,) float64: what does not depend on the steps (messages, latency), and each step."""

    fixed: Tensor
    step: Tensor

    def after(self, steps: Tensor) -> Tensor:
        """Return the seconds from the invitation to the answer."""
        return self.fixed + self.step * steps


class Devices(Protocol):
    """Draws how long clients take."""

    def times(self, key: Key, clients: Tensor, load: Load) -> Times:
        """Return the times of clients (S,) int64. ``key`` is the phase's, folded with the copy numbers: (S,)."""
        ...


@dataclass(frozen=True)
class Homogeneous:
    """A client answers after ``median_s * exp(sigma * normal)`` virtual seconds, independently in every phase.

    Times are alike for all clients, so the first S answers are a uniformly random subset of those online (CDMA, section 2).
    """

    median_s: float = 1.0
    sigma: float = 0.5

    def times(self, key: Key, clients: Tensor, load: Load) -> Times:
        """Return the times, spread evenly over the steps, if there are any."""
        normal = rng.normal(rng.fold(key, "seconds", clients), (), torch.float64)
        whole = self.median_s * torch.exp(self.sigma * normal)
        return Times(torch.where(load.steps > 0, 0.0, whole), whole / load.steps.clamp(min=1))
