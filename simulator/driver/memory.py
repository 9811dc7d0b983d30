"""The engine's memory between rounds: committed when a round is accepted, discarded when an attempt is aborted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fedfleet.simulator.driver.state import ClientStore, Slots
from fedfleet.simulator.fleet.in_flight import Flights, InFlight
from fedfleet.simulator.fleet.late import Assignment, Late
from fedfleet.simulator.fleet.selection import Selection


class Remembered(NamedTuple):
    """What is remembered after the last round that was accepted, as a checkpoint holds it."""

    states: Slots
    late: tuple[Assignment, ...]
    flights: tuple[InFlight, ...]
    launched: int
    selection: Any


class Memory:
    """Client states (in the file ``states``), late work, flights, and what the selection has learnt."""

    def __init__(self, selection: Selection, states: Path | None = None) -> None:
        self.store, self.late, self.flights = ClientStore(states), Late(), Flights()
        self._forgets = selection.feedback or getattr(selection, "again", False)
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
        # What was learnt of clients is forgotten, but not that they were asked, unless they have their turn again.
        if self._forgets:
            self.selection = self._selection_before

    def remembered(self) -> Remembered:
        """Return what has been committed."""
        flights, launched = self.flights.committed
        return Remembered(self.store.slots(), self.late.committed, flights, launched, self._selection_before)

    def restore(self, result: Remembered) -> None:
        """Go on from what was committed. Raises StateError."""
        self.store.restore(result.states)
        self.late.committed = result.late
        self.flights.committed = result.flights, result.launched
        self.selection = self._selection_before = result.selection
        self.late.discard()
        self.flights.discard()
