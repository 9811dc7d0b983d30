"""Policies of responses: whom the server waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key


def rounded_up(x: float) -> int:
    """Return the least whole number not below ``x``, where 10 * 1.1 is 11."""
    return math.ceil(round(x, 9))


class Close(NamedTuple):
    """The end of a phase: the answers that count, the earliest ``completed``, and the seconds since the invitation."""

    completed: int
    seconds: float


class ResponsePolicy(Protocol):
    """Says when the server stops listening."""

    def close(self, answers: Tensor, invited: int, settled: float, key: Key) -> Close:
        """Return the end of the phase.

        Args:
            answers: (R,) float64 ascending, the seconds after which answers come in.
            invited: clients invited.
            settled: seconds after which no answer is outstanding: everybody online has answered or failed.
            key: for draws of the policy.

        """
        ...


@dataclass(frozen=True)
class WaitAll:
    """Wait for everybody who is online, until they have answered or failed."""

    def close(self, answers: Tensor, invited: int, settled: float, key: Key) -> Close:
        """Hear every answer."""
        return Close(len(answers), settled)


@dataclass(frozen=True)
class First:
    """Go on with the first ``count`` answers, or with all there are."""

    count: int

    def close(self, answers: Tensor, invited: int, settled: float, key: Key) -> Close:
        """Hear the first answers."""
        return _first(self.count, answers, settled)


@dataclass(frozen=True)
class Siwer:
    """Start immediately with enough responses (CDMA): ``S_t = ceil(p_t * invited)``, p_t uniform in (low, high], drawn afresh."""

    low: float = 0.5
    high: float = 1.0

    def wanted(self, invited: int, key: Key) -> int:
        """Return S_t. Drawing p from the half-open (low, high] makes the law of S_t exact, e.g. 5, 6, 7, 8 of 8 alike."""
        p = self.high - (self.high - self.low) * float(rng.uniform(rng.fold(key, "responses"), (), torch.float64))
        return max(1, rounded_up(p * invited))

    def close(self, answers: Tensor, invited: int, settled: float, key: Key) -> Close:
        """Hear the first S_t answers."""
        return _first(self.wanted(invited, key), answers, settled)


@dataclass(frozen=True)
class Deadline:
    """Stop listening after so many seconds, or as soon as another policy does."""

    deadline_s: float
    before: ResponsePolicy = WaitAll()

    def close(self, answers: Tensor, invited: int, settled: float, key: Key) -> Close:
        """Hear what comes in time."""
        result = self.before.close(answers, invited, settled, key)
        in_time = int(torch.searchsorted(answers, self.deadline_s, right=True))
        return Close(min(result.completed, in_time), min(result.seconds, self.deadline_s))


def _first(count: int, answers: Tensor, settled: float) -> Close:
    if len(answers) < count:
        return Close(len(answers), settled)
    return Close(count, float(answers[count - 1]))
