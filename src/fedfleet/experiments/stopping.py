"""Reasons to end a run early: a metric that is reached or no longer improves, seconds, privacy, divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedfleet.config import resolve
from fedfleet.config.schema import Config
from fedfleet.middleware.privacy.wrap import Promise
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.faults import LOWER
from fedfleet.simulator.driver.evaluation import less_is_better
from fedfleet.simulator.driver.records import PhaseRecord
from fedfleet.tracking.callback import Stop

DIVERGED, PAUSED = "stop_if_diverged", "pause"
KEYS = ("until", "max_seconds", DIVERGED, "patience", "privacy.epsilon", "example_privacy.epsilon")
"""What of a configuration ends a run; everything else that does is a callback."""


class Stopping:
    """Says when a run is to end. What it knows of evaluations follows from the tables, so that a resumed run knows the same."""

    def __init__(self, config: Config, promises: Sequence[Promise]):
        self._config, self._promises = config, promises
        self._best: float | None = None
        self._since = 0  # evaluations since the best

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation; all of a run come once, in order, the initial model's first."""
        given = self._config.patience
        if given is None or not metrics:
            return
        value = metrics.get(given.metric)
        sign = -1 if less_is_better(given.metric) else 1
        if value is None or not math.isfinite(value):
            self._since += 1
        elif self._best is None or sign * (value - self._best) > given.min_delta:
            self._best, self._since = value, 0
        else:
            self._since += 1

    def patience(self) -> Stop | None:
        """Say whether the metric has not improved for so many evaluations."""
        given = self._config.patience
        if given is None or self._since < given.evaluations:
            return None
        best = "was never a finite number" if self._best is None else f"was never better than {self._best:.6g}"
        by = f" by more than {given.min_delta:g}" if given.min_delta and self._best is not None else ""
        return Stop("patience", f"{given.metric} {best}{by} in the last {self._since} evaluations")

    def until(self, metrics: Mapping[str, float]) -> Stop | None:
        """Say whether an evaluation has reached what is wanted."""
        if self._config.until is None:
            return None
        metric, at_least, value = resolve.parse_until(self._config.until)
        result = metrics.get(metric)
        if result is None or not (result >= value if at_least else result <= value):
            return None
        return Stop("until", f"{metric} is {result:.6g}, and until={self._config.until}")

    def seconds(self, spent: float) -> Stop | None:
        """Say whether time is up."""
        most = self._config.max_seconds
        return None if most is None or spent <= most else Stop("max_seconds", f"max_seconds={most:g} are over")

    def privacy(self, state: Any, index: int) -> Stop | None:
        """Say whether another round could spend more privacy than was promised; none follows the last one."""
        for promise in self._promises if index < self._config.rounds else ():
            if not promise.allows(state):
                key = f"{promise.key}.epsilon"
                return Stop(key, f"another round could spend more than {key}={promise.budget:g}")
        return None

    def divergence(self, index: int, phases: Sequence[PhaseRecord], z: Tree) -> Stop | None:
        """Say in which way training has diverged in a round, where the run is to stop then; ``z`` is the model after it."""
        bound = self._config.stop_if_diverged
        if bound is None:
            return None
        most = math.inf if bound == "not_finite" else bound
        for phase in phases:
            loss = phase.train_loss
            if loss is not None and not (math.isfinite(loss) and loss <= most):
                above = f", above stop_if_diverged={most:g}" if math.isfinite(loss) else ""
                return Stop(DIVERGED, f"round {index}, phase {phase.phase!r}: the training loss is {loss:g}{above}")
        if not all(bool(leaf.isfinite().all()) for leaf in T.leaves(z)):
            return Stop(DIVERGED, f"round {index}: the model is not finite")
        return None


def paused(done: int, rounds: int) -> Stop:
    """Return why a run stands that whoever began it lets go on later, or not."""
    return Stop(PAUSED, f"{done} of {rounds} rounds are done, as many as were asked for")


def told(stop: Stop) -> str:
    """Return a line that says why a run has stopped."""
    fix = f": {LOWER}" if stop.by == DIVERGED else ""
    by = "" if stop.by in KEYS else f"{stop.by}: "
    return f"stopped: {by}{stop.why}{fix}"
