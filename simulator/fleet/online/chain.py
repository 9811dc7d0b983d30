"""Two-state chains in rounds whose state in any round is found without a history.

A chain of share pi (of the rounds it is on) and lag correlation r goes from round to round by

    P(off -> on) = pi (1 - r),   P(on -> off) = (1 - pi) (1 - r),
    P_h(a, on) = pi + (a - pi) r^h,   the chance of being on h rounds after state a in {0, 1}.

As ``markov`` does in continuous time: states at the multiples of 2^levels rounds are drawn from pi alone, as their true
correlation, at most exp(-40), is less than float64 resolves; the state half-way between two known ones, h rounds apart, is
drawn from the bridge

    P(mid = s | a, b) = P_{h/2}(a, s) P_{h/2}(s, b) / P_h(a, b),

down to single rounds, on which the law is exact. A question costs at most ``levels`` draws a client, about log2(40 / -log |r|),
whatever the round: 10 for r = 0.95, 26 for r = 1 - 1e-6.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key

SPAN = 40.0  # correlation times that make two states independent


def levels(lag: float) -> int:
    """Return the halvings that chains need whose lag correlations are at most ``lag`` in size, below 1."""
    return 0 if lag < math.exp(-SPAN) else max(0, math.ceil(math.log2(SPAN / -math.log(lag))))


def chain(key: Key, ids: Tensor, round: int, share: Tensor, lag: Tensor, halvings: int) -> Tensor:
    """Return bool (S,), whether chains ``ids`` (S,) int64 are on in a round.

    Args:
        key: a scalar, of the run.
        ids: numbers of the chains; each goes its own way.
        round: from 0.
        share, lag: pi and r of each (S,) float64; r is above -1, and below where pi (1 - r) or (1 - pi) (1 - r) would pass 1.
        halvings: ``levels`` of the largest |r| there can be; the same for all questions of a run.

    """
    span, cell = round >> halvings, round & ((1 << halvings) - 1)
    own = rng.fold(key, ids)
    before = rng.bernoulli(rng.fold(own, "end", span), share)
    if not cell:
        return before
    after = rng.bernoulli(rng.fold(own, "end", span + 1), share)
    inside = rng.fold(own, "inside", span)
    for level in range(halvings):
        left = halvings - level - 1
        kept = lag ** float(1 << left)
        to_on = share + (1 - share) * kept, share - share * kept  # from on, from off, in half the time
        first = torch.where(before, *to_on)
        on = first * torch.where(after, to_on[0], 1 - to_on[0])
        off = (1 - first) * torch.where(after, to_on[1], 1 - to_on[1])
        node = torch.tensor((1 << level) + (cell >> (left + 1)))  # a number for each level and place
        middle = rng.uniform_at(inside, node) * (on + off) < on
        if cell >> left & 1:
            before = middle
        else:
            after = middle
        if not cell & ((1 << left) - 1):  # from here on, it is the start of a stretch that is known
            break
    return before
