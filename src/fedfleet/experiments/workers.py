"""Workers that serve one run after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedfleet.assembly.prepared import Prepared
from fedfleet.simulator.executors.base import Executor


class Workers:
    """Keeps an executor for the next run, if that asks for the same one: actors take seconds. It knows what runs were told."""

    def __init__(self) -> None:
        self._executor: Executor | None = None
        self._asked: Any = None
        self._told = set[str]()

    def first(self, line: str) -> bool:
        """Return whether none of the runs has been told a line of advice yet, which this one is now."""
        if line in self._told:
            return False
        self._told.add(line)
        return True

    @contextmanager
    def of(self, x: Prepared) -> Iterator[Executor]:
        """Yield the executor of a run; after an error it is let go, for who knows what state it is in."""
        if self._executor is None or self._asked != x.asked_of_executor:
            self.close()
            self._executor, self._asked = x.executor(), x.asked_of_executor
        try:
            yield self._executor
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the executor go."""
        if self._executor is not None:
            self._executor.close()
        self._executor = None
