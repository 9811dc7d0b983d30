"""A rate of availability that changes from phase to phase, for all clients together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.availability import same


@dataclass(frozen=True)
class RandomRate:
    """In every phase one p_t is drawn, uniformly from (low, high], and each client is online with probability p_t.

    This reads CDMA's p_t as a chance of being online: of S-hat clients invited, a Binomial(S-hat, p_t) number is. In CDMA
    itself, p_t says how many answers the server waits for, S_t = ceil(p_t S-hat): that is `policies.Siwer`.
    """

    low: float
    high: float
    varies: ClassVar[bool] = False

    def rate(self, key: Key) -> Tensor:
        """Return p_t, float64, of the phases with these keys."""
        u = rng.uniform(rng.fold(key, "online rate"), (), torch.float64)
        return self.high - (self.high - self.low) * u

    def online(self, key: Key, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return draws that are independent, given the phase's rate; the same uniforms as Bernoulli's."""
        return rng.bernoulli(rng.fold(key, "online", clients), self.rate(key))

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the mean of p_t, which is drawn for all clients of a phase together, once for both of its questions."""
        return same(clients, (self.low + self.high) / 2)

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the mean of p_t."""
        return same(clients, (self.low + self.high) / 2)
