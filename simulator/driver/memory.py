"""What the engine remembers between rounds: committed when a round is accepted, unchanged by one that is void."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fedfleet.simulator.driver.state import ClientStore, Slots
from fedfleet.simulator.fleet.flights import Flight, Flights
from fedfleet.simulator.fleet.late import Assignment, Late
from fedfleet.simulator.fleet.selection import Selection


class Remembered(NamedTuple):
    """What is remembered after the last round that was accepted, as a checkpoint holds it."""

    states: Slots
    late: tuple[Assignment, ...]
    flights: tuple[Flight, ...]
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

    def restore(self, found: Remembered) -> None:
        """Go on from what was committed. Raises StateError."""
        self.store.restore(found.states)
        self.late.committed = found.late
        self.flights.committed = found.flights, found.launched
        self.selection = self._selection_before = found.selection
        self.late.discard()
        self.flights.discard()
