"""Colluding attacks: all attackers send the same, made from updates that they know before any is sent.

    alie           Baruch, Baruch & Goldberg, "A little is enough: circumventing defenses for distributed learning",
                   NeurIPS 2019, Algorithm 3: mu - z sigma in each coordinate. mu and sigma are the mean and the
                   standard deviation (of m, not m - 1) of the m attackers' own updates. z = z_max with
                   Phi(z_max) = (n - m - s)/(n - m). Here n clients answer, and s = floor(n/2 + 1) - m of them have
                   to be won over.
    inner_product  Xie, Koyejo & Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
                   manipulation", UAI 2019, Section 4: -epsilon times the mean of the honest clients' updates.

Means are over clients, whatever their weights. In the papers all clients send in every round; here those do that
answer in an exchange. Buffers, such as BatchNorm's statistics, are sent as the mean of the known clients' buffers.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.middleware.attacks.kinds.base import Attack
from fedfleet.simulator.author import BUFFERS, T, Tree, UploadMatrix, trainable


class _Colluding(Attack):
    colludes: ClassVar[bool] = True

    def known(self, theirs: Tensor) -> Tensor:
        """Return whose updates the attackers know, a mask (S,)."""
        return theirs if getattr(self, "knows", "attackers") == "attackers" else ~theirs

    def colluded(self, uploads: UploadMatrix, theirs: Tensor, origin: Tree) -> UploadMatrix:
        """Return the uploads with the attackers' replaced; as they are where none attacks, or nobody is known."""
        known = self.known(theirs)
        if not theirs.any() or not known.any():
            return uploads
        start = None if origin is None else trainable(origin)
        sent = self.agreed(uploads.of(trainable), theirs, known, start)
        if not isinstance(sent, Tensor) and BUFFERS in uploads.blocks[0]:
            mean = known.double() / known.sum()
            sent = {**sent, BUFFERS: uploads.of(lambda z: z[BUFFERS]).combine(mean)}
        return uploads.replacing(theirs, sent)

    def agreed(self, uploads: UploadMatrix, theirs: Tensor, known: Tensor, origin: Tree) -> Tree:
        """Return what the attackers (S,) send, of the updates of those known (S,)."""
        raise NotImplementedError


class Alie(_Colluding):
    """The attackers send what lies a little off the mean, so that it is within what clients differ by."""

    z: Literal["auto"] | float = Field(default="auto")
    """Standard deviations off the mean; auto: z_max, 0 where even the mean would not win enough clients over."""
    knows: Literal["attackers", "honest"] = "attackers"
    """Whose mean and standard deviation: the attackers', as in the paper, or those of the honest clients heard."""

    def agreed(self, uploads: UploadMatrix, theirs: Tensor, known: Tensor, origin: Tree) -> Tree:
        """Return mu - z sigma."""
        z = z_max(len(theirs), int(theirs.sum())) if self.z == "auto" else self.z

        def off(tile: Tensor) -> Tensor:
            mine = tile[known.to(tile.device)].double()
            return (mine.mean(0) - z * mine.std(0, correction=0)).to(tile.dtype)

        return uploads.reduce(off)


class InnerProduct(_Colluding):
    """The attackers send the mean update the other way round, so that its product with what is aggregated is negative."""

    epsilon: float = Field(default=0.5, gt=0)
    """How many times as long it is: small against Krum, larger against median and mean."""
    knows: Literal["attackers", "honest"] = "honest"
    """Whose mean: that of the honest clients heard, as in the paper, or the attackers' own."""

    def agreed(self, uploads: UploadMatrix, theirs: Tensor, known: Tensor, origin: Tree) -> Tree:
        """Return -epsilon times the mean."""
        step = uploads.combine(-self.epsilon * known.double() / known.sum(), origin)
        return step if origin is None else T.add(origin, step)


def z_max(heard: int, attackers: int) -> float:
    """Return the standard deviations that so many attackers of the clients heard may be off the mean, at the least 0."""
    honest = heard - attackers
    needed = max(1, math.floor(heard / 2 + 1) - attackers)
    if honest <= needed:
        return 0.0
    return max(0.0, float(torch.special.ndtri(torch.tensor((honest - needed) / honest, dtype=torch.float64))))
