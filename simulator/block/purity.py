"""What client code must leave as it was, so that results do not depend on the order of work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.client import ClientInputs
from fedfleet.simulator.errors import ClientError


def _versions(shared: Mapping[str, Any]) -> dict[str, int]:
    """Return how often each shared tensor was written to."""
    return {path: leaf._version for path, leaf in T.named_leaves(shared) if isinstance(leaf, Tensor)}


class Purity:
    """What client code must leave as it was: torch's generator, and the tensors it is given."""

    def __init__(self, phase: str, shared: Mapping[str, Any], inputs: ClientInputs):
        self._phase, self._shared = phase, shared
        self._given = {"own": inputs.own, "inbox": inputs.inbox, "batch": inputs.batches}
        self._generator, self._versions = torch.get_rng_state(), (_versions(shared), _versions(self._given))

    def check(self) -> None:
        """Raise ClientError where something has changed."""
        if not torch.equal(self._generator, torch.get_rng_state()):
            raise ClientError(
                f"phase {self._phase!r}: client code drew from torch's global generator, so results would depend on the order of "
                f"work: draw from the step's key with rng of fedfleet.simulator.author instead"
            )
        shared, given = self._versions
        if written := [path for path, version in _versions(self._shared).items() if version != shared[path]]:
            raise ClientError(
                f"phase {self._phase!r}: client code wrote in place into {written[0]!r}, which all clients share, so results "
                f"would depend on the order of work: return new tensors instead"
            )
        if written := [path for path, version in _versions(self._given).items() if version != given[path]]:
            raise ClientError(
                f"phase {self._phase!r}: client code wrote in place into {written[0]!r}, so the block could not be run a second "
                f"time: return new tensors instead"
            )
