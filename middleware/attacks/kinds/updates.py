"""Update attacks: each attacker by itself sends something else than its update.

    sign_flip   -scale d                     d is the update, how far its model moved (or what else it sends)
    scaled      factor d
    noise       N(0, std^2), or d with that: the Gaussian attack of Blanchard, El Mhamdi, Guerraoui & Stainer, "Machine
                learning with adversaries: Byzantine tolerant gradient descent", NIPS 2017, Section 5, whose std is 200

Every slot of a phase is forged, each apart. Exempt are a model's buffers, whole numbers, message scalars, and slots
of one number, such as a loss or q-FedAvg's h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from fedfleet.middleware.attacks.kinds.base import Attack
from fedfleet.simulator.author import Key, rng


class _Forging(Attack):
    @property
    def forges(self) -> bool:
        """Always."""
        return True


class SignFlip(_Forging):
    """Each attacker sends its update the other way round."""

    scale: float = Field(default=1.0, gt=0)
    """How many times as long it is."""

    def forged(self, moved: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        """Return the update times -scale."""
        return {name: leaf * -self.scale for name, leaf in moved.items()}


class Scaled(_Forging):
    """Each attacker sends its update longer than it is."""

    factor: float = Field(default=10.0, gt=0)
    """How many times."""

    def forged(self, moved: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        """Return the update times the factor."""
        return {name: leaf * self.factor for name, leaf in moved.items()}


class Noise(_Forging):
    """Each attacker sends normal noise."""

    std: float = Field(default=1.0, gt=0)
    """Standard deviation of each number."""
    add: bool = False
    """Send the update with the noise added, rather than noise alone."""

    def forged(self, moved: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        """Return drawn numbers."""
        drawn = {n: self.std * rng.normal(rng.fold(key, n), tuple(leaf.shape), leaf.dtype) for n, leaf in moved.items()}
        return {n: moved[n] + x for n, x in drawn.items()} if self.add else drawn
