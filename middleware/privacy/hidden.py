"""The message of a client that is to be hidden among others: clipped, with its part of the noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedfleet.middleware.compression.codecs.clip import Clip, clipped, length, shortened
from fedfleet.simulator.author import Encoding, Key, Slots, normals, rng

NORM, SHARE, WITHIN = "clip_norm", "noise_share", "within_clip_norm"
"""Scalars by which the server tells the bound, where it changes, and a client's part of the noise, its standard deviation over the
bound; and by which a client tells whether its message was within it.
"""


class Hidden(Clip):
    """A clipped message of a run with differential privacy: its client's share of the noise, and whether it was within the norm."""

    noisy: bool = False
    """Add a part of the noise, as large as the server says; nothing may come after it then."""
    tells: bool = False
    """The norm follows a quantile of norms: take it as the server tells it, and tell whether the message was within it."""

    @property
    def linear(self) -> bool:
        """Where no noise is added."""
        return not self.noisy

    def encode(self, send: Slots, key: Key, shared: Mapping[str, Any]) -> Encoding:
        """Return the message shortened, with noise or to be shortened once more, and what is told of its norm."""
        # Where the norm stays, a scalar of that name is the algorithm's own.
        bound = shared.get(NORM, self.norm) if self.tells else self.norm
        told = {WITHIN: (length(send) <= bound).to(torch.float64)} if self.tells else {}
        if not self.noisy:
            return clipped(send, bound, told)
        std = shared[SHARE] * bound
        noisy = {
            slot: {
                name: leaf + normals(rng.fold(key, slot, name), tuple(leaf.shape)).to(leaf.dtype) * std
                for name, leaf in leaves.items()
            }
            for slot, leaves in shortened(send, bound).items()
        }
        return Encoding(noisy, lambda rest: rest, scalars=told)
