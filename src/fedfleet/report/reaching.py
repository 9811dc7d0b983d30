"""Cost until runs reached a value of a metric: a row a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedfleet.report.sheet import Grid
from fedfleet.report.study_tables import TO_TARGET, Target, evaluations, reached
from fedfleet.report.tables import Run, told_in
from fedfleet.report.words import MISSING, duration, number, quantity


def table(groups: Mapping[str, Sequence[Run]], target: Target) -> Grid:
    """Return means over the runs of each label, given where all of them got there. Raises ValueError where no run measured it."""
    metric = target.metric.removeprefix("eval/")
    known = {m for runs in groups.values() for run in runs for m in run.metrics}
    if metric not in known:
        raise ValueError(f"--target: no run has measured {metric!r}, only {', '.join(sorted(known)) or 'nothing'}")
    columns = {"rounds": number, "floats": quantity}
    if told_in(run for runs in groups.values() for run in runs) == "bytes":
        columns = {"rounds": number, "bytes_up": _bytes, "bytes_down": _bytes}
    columns |= {"virtual_s": duration}
    rows = []
    for label, runs in groups.items():
        result = np.array([reached(evaluations(run), target) for run in runs])
        there = np.isfinite(result[:, 0])
        mean = dict(zip(TO_TARGET, result.mean(0), strict=True))
        cells = [show(mean[f"target/{name}"]) if there.all() else MISSING for name, show in columns.items()]
        rows.append([label, f"{there.sum()} of {len(runs)}", *cells])
    names = {"floats": "floats, up and down", "virtual_s": "virtual time"}
    head = ["label", "runs that reached it", *(names.get(name, name.replace("_", " ")) for name in columns)]
    text = (
        f"What had been done by the first evaluation that found {target}: means over runs, given where all got there."
    )
    return Grid(head, rows, text)


def _bytes(value: float | None) -> str:
    return quantity(value, "B")
