"""Results as plain data, and what is read from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.peers.workload import Case


def result(case: Case, seconds: Sequence[float], executor: str) -> dict[str, Any]:
    """Return the measured rounds of a case, with rates at the median round."""
    typical = median(seconds)
    return {
        "case": case.name,
        "executor": executor,
        "client_updates_per_s": case.cohort / typical,
        "client_steps_per_s": case.cohort * case.steps / typical,
        "seconds_per_round": typical,
        "seconds": list(seconds),
        "rounds": len(seconds),
        "cohort": case.cohort,
        "steps": case.steps,
    }


def emit(found: Sequence[dict[str, Any]], title: str, as_json: bool) -> None:
    """Print results: a table, or JSON (one object for one result, a list for several)."""
    if as_json:
        everything = [r | {"machine": command.machine()} for r in found]
        print(json.dumps(everything[0] if len(everything) == 1 else everything))
        return
    columns = ["case", "cohort", "steps", "s a round", "client updates/s", "client steps/s", "run by"]
    keys = ("case", "cohort", "steps", "seconds_per_round", "client_updates_per_s", "client_steps_per_s", "executor")
    command.show(title, columns, [[r[k] for k in keys] for r in found])


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the points; 0 through a single one."""
    if len(x) < 2:
        return 0.0
    u, v = np.asarray(x, float), np.asarray(y, float)
    u = u - u.mean()
    return float(u @ (v - v.mean()) / (u @ u))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return p of the power law y = c x^p that fits best on logarithmic axes."""
    return slope(np.log(x).tolist(), np.log(y).tolist())
