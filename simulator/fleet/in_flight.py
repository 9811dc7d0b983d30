"""Clients at work for an asynchronous server: a queue of answers to come, on the virtual clock.

Virtual times do not depend on what clients compute, so the queue is resolved first and the work is done when an answer is
used, from the version of the model that the client was sent (Nguyen et al. 2022, FedBuff).
"""

from __future__ import annotations

from typing import NamedTuple


class InFlight(NamedTuple):
    """One invitation that was taken up; ordered by the moment it ends, then by its number.

    Attributes:
        ends_s: when it answers or fails, on the virtual clock.
        number: counts invitations over the run, also those not taken up; the copy number of the draws of the client's work.
        client: who.
        version: the round in which it was invited, hence the model it works on.
        steps: local steps it takes.
        fails: whether it ends without an answer.

    """

    ends_s: float
    number: int
    client: int
    version: int
    steps: int
    fails: bool


class Flights:
    """The flights under way; changes of a round are committed with it."""

    def __init__(self) -> None:
        self.committed: tuple[tuple[InFlight, ...], int] = ((), 0)
        self._now: list[InFlight] = []
        self.launched = 0

    def under_way(self) -> list[InFlight]:
        """Return the flights, a heap of the caller's own."""
        return self._now.copy()

    def replace(self, flights: list[InFlight], launched: int) -> None:
        """Enter how things stand at the end of the round: a heap, and the invitations so far."""
        self._now, self.launched = flights, launched

    def clients(self) -> set[int]:
        """Return who is at work."""
        return {f.client for f in self._now}

    def versions(self) -> set[int]:
        """Return the versions somebody works on."""
        return {f.version for f in self._now}

    def commit(self) -> None:
        """Accept the round."""
        self.committed = (tuple(self._now), self.launched)

    def discard(self) -> None:
        """Forget the round."""
        flights, self.launched = self.committed
        self._now = list(flights)

    def __len__(self) -> int:
        return len(self._now)
