"""Metrics that a page shows at once, and those that it folds: of other splits, of single clients, and spreads."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from fedfleet.report.tables import Run

FOLDED = re.compile(r"^(validation|train|held_out|clients)_|_(std|spread)$")
"""Names of metrics that are folded unless they were asked for."""


def asked_for(runs: Sequence[Run]) -> set[str]:
    """Return the metrics by which models were selected or runs stopped."""
    result = set[str]()
    for run in runs:
        patience = run.config.get("patience")
        stops = re.split(r"[<>=]", str(run.config.get("until") or ""))[0]
        named: list[Any] = [run.get("checkpoint", "best"), stops]
        named.append(patience.get("metric") if isinstance(patience, dict) else None)
        result |= {str(name).strip().removeprefix("eval/") for name in named if name}
    return result


def parted(metrics: Sequence[str], asked: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the metrics that are shown and those that are folded; where all would be, the first is shown."""
    shown = [metric for metric in metrics if metric in asked or not FOLDED.search(metric)] or list(metrics[:1])
    return shown, [metric for metric in metrics if metric not in shown]
