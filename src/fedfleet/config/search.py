"""Distributions of hyper-parameters: ranges and choices, as they are written, checked and drawn from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfleet.config.checking import unknown
from fedfleet.config.reading import override
from fedfleet.files.documents import parse
from fedfleet.simulator.errors import ConfigError, show

REFUSED = {
    "compare": "each label is tuned by itself",
    "vary": "each point is tuned by itself",
    "tune": "give the options of tune themselves",
    "label": "a trial's label says its values",
    "seed": "give seeds for several a trial",
    "seeds": "give seeds for several a trial",
    "rounds": "the scheduler gives rounds out",
    "until": "trials would stop at different rounds",
    "max_seconds": "trials would end where the machine has got to",
    "executor": "it decides where trials run, not what comes out",
    "evaluation": "trials would be measured differently",
    "checkpoint": "it decides nothing of what comes out",
    "track": "it decides nothing of what comes out",
}
"""Keys that cannot be searched, and why."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``: whole ones, both ends included, or multiples of ``step`` from ``low`` on, or any.

    Attributes:
        log: drawn uniformly in the logarithm.

    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    step: float | None = None

    def at(self, u: float) -> float | int:
        """Return the value at a quantile ``u`` in [0, 1)."""
        if self.step is not None:
            return self.low + self.step * math.floor(u * self.steps)
        high = self.high + 1 if self.whole else self.high
        if self.log:
            result = math.exp(math.log(self.low) + u * (math.log(high) - math.log(self.low)))
        else:
            result = self.low + u * (high - self.low)
        return min(max(math.floor(result) if self.whole else result, self.low), self.high)

    @property
    def steps(self) -> int:
        """How many multiples there are."""
        assert self.step is not None
        return math.floor((self.high - self.low) / self.step + 1e-9) + 1

    def probes(self) -> list[Any]:
        """Return values that show whether a key takes all of them."""
        return [self.at(0.0), self.at(0.37), self.high if self.step is None else self.at(1 - 1e-12)]


@dataclass(frozen=True)
class Choice:
    """One of some values, of any kind."""

    values: Sequence[Any]

    def at(self, u: float) -> Any:
        """Return the value at a quantile ``u`` in [0, 1)."""
        return self.values[math.floor(u * len(self.values))]

    def probes(self) -> list[Any]:
        """Return all of them."""
        return list(self.values)


Distribution = Range | Choice
KINDS = {
    "uniform": ("(low, high)", 2),
    "loguniform": ("(low, high)", 2),
    "quniform": ("(low, high, step)", 3),
    "randint": ("(low, high)", 2),
    "lograndint": ("(low, high)", 2),
    "choice": ("(value, value, ...)", None),
}


def searched(text: str) -> dict[str, str]:
    """Read ``dotted.key=distribution`` as an override does. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ConfigError(
            f"--search {show(text)}: write dotted.key=distribution, such as algorithm.lr=loguniform(1e-3, 1)"
        )
    override(f"{key}=0")  # is it a key?
    return {key.strip(): value.strip()}


def space(search: Mapping[str, Any]) -> dict[str, Distribution]:
    """Read distributions by dotted key. Raises ConfigError naming the key."""
    return {key: _read(key, given) for key, given in search.items()}


def _read(key: str, given: Any) -> Distribution:
    where = f"tune.search.{key}={show(given)}"
    if (why := REFUSED.get(key.split(".")[0])) is not None:
        raise ConfigError(f"{where}: it cannot be searched: {why}")
    if isinstance(given, list):
        return _choice(where, given)
    result = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", given, re.DOTALL) if isinstance(given, str) else None
    forms = ", ".join(f"{name}{form}" for name, (form, _) in KINDS.items())
    if result is None:
        raise ConfigError(f"{where}: no distribution: write one of {forms}, or a list of values")
    kind = result[1]
    if kind not in KINDS:
        raise ConfigError(unknown(f"tune.search.{key}", kind, KINDS))
    try:
        values = parse(f"[{result[2]}]")
    except ValueError:
        raise ConfigError(f"{where}: its values are not YAML: write {kind}{KINDS[kind][0]}") from None
    return _choice(where, values) if kind == "choice" else _range(where, kind, values)


def _choice(where: str, values: list[Any]) -> Choice:
    if not values or any(a == b for i, a in enumerate(values) for b in values[:i]):
        raise ConfigError(f"{where}: give one value or more, each once")
    return Choice(values)


def _range(where: str, kind: str, values: list[Any]) -> Range:
    form, many = KINDS[kind]
    whole = kind.endswith("randint")
    numbers = all(isinstance(v, int if whole else int | float) and not isinstance(v, bool) for v in values)
    if len(values) != many or not numbers or not all(math.isfinite(v) for v in values):
        raise ConfigError(f"{where}: write {kind}{form}, {'whole numbers' if whole else 'numbers'}")
    low, high, step = values[0], values[1], values[2] if many == 3 else None
    log = kind.startswith("log")
    if not low < high:
        raise ConfigError(f"{where}: low={low:g} is not below high={high:g}: give them in order")
    if log and low <= 0:
        raise ConfigError(f"{where}: low={low:g} has no logarithm: give one above 0, or use {kind.removeprefix('log')}")
    if step is not None and not 0 < step <= high - low:
        raise ConfigError(f"{where}: step={step:g}: give one above 0, and of at most {high - low:g}")
    if whole:
        return Range(low, high, log, whole)
    stepped = step is not None and all(isinstance(v, int) for v in values)  # whole steps stay whole numbers
    return Range(*((low, high) if stepped else (float(low), float(high))), log, step=step)
