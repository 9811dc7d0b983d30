"""What the engine remembers between rounds: committed when a round is accepted, unchanged by one that is void."""

from __future__ import annotations

from typing import Any

from fedfleet.simulator.flights import Flights
from fedfleet.simulator.late import Late
from fedfleet.simulator.selection import Selection
from fedfleet.simulator.state import ClientStore


class Memory:
    """Client states, late work, flights, and what the selection has learnt."""

    def __init__(self, selection: Selection) -> None:
        self.store, self.late, self.flights = ClientStore(), Late(), Flights()
        self._learns = selection.feedback
        self.selection: Any = selection.init()
        self._selection_before = self.selection

    def commit(self) -> None:
        """Accept the round."""
        for part in (self.store, self.late, self.flights):
            part.commit()
        self._selection_before = self.selection

    def discard(self) -> None:
        """Forget the round."""
        for part in (self.store, self.late, self.flights):
            part.discard()
        if (
            self._learns
        ):  # what was learnt of clients is forgotten, but not that they were asked: a new cohort is a new one
            self.selection = self._selection_before
