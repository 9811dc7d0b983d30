"""The winners of several searches: a table of them, whether their grids are to be extended, and one configuration of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedfleet.config import schema as C
from fedfleet.config.schema import Config
from fedfleet.config.search import Choice, Distribution
from fedfleet.experiments import campaign
from fedfleet.experiments import sweep as grids
from fedfleet.experiments.same_run import differences
from fedfleet.files import parquet
from fedfleet.files.documents import dump, leaves
from fedfleet.files.writing import write_text
from fedfleet.report.tuning_tables import Findings, Winner, Winners
from fedfleet.report.winners_page import write_winners_report
from fedfleet.report.words import number
from fedfleet.simulator.errors import ConfigError
from fedfleet.tuning.findings import BEST
from fedfleet.tuning.schedules import Trial, winner
from fedfleet.tuning.search import Search
from fedfleet.tuning.several import Cell, Searches, own

TABLE = "winners.parquet"
APART = ("label", "seed", "seeds", "compare", "vary", "tune")
"""Keys that no entry of ``compare`` sets."""
NEAR = 0.05
"""Share of a range that counts as its edge, at each end."""


class Result(NamedTuple):
    """The outcome of a search."""

    cell: Cell
    found: Findings
    trials: Sequence[Trial]


def write(searches: Searches, results: Sequence[Result], out: Path) -> Winners:
    """Write `winners.parquet`, `best.yaml`, if anything won, and `report.html`, and return what is in them."""
    found = Winners(
        each=[_winner(result) for result in results],
        varied=grids.axes(searches.config) if searches.config.vary else {},
        best=_best(searches.config, results),
        lost=grids.left_out([result.cell.point for result in results]),
    )
    parquet.write(table(found), out / TABLE)
    if found.best is not None:
        write_text(out / BEST, found.best)
    write_winners_report(found, out, campaign.as_given(searches.config))
    return found


def _winner(result: Result) -> Winner:
    (point, search), found, trials = result
    best = winner(trials)
    return Winner(
        name=point.name,
        label=point.label,
        folder=point.place,
        algorithm=C.SECTIONS["algorithm"].registry.name_of(point.config.algorithm),
        point=point.point,
        found=found,
        edges={} if best is None else edges(search, best.values),
    )


def table(result: Winners) -> pd.DataFrame:
    """Return a row a search: its label and point, the winner's values, and how it did."""
    rows = [
        {
            "label": each.label,
            "algorithm": each.algorithm,
            **{key: each.point.get(key) for key in result.varied},
            **{key: each.row.get(key) for key in result.keys},
            "metric": result.metric,
            "value": each.row.get("value"),
            "trial": each.found.winner,
            "rounds": each.row.get("rounds"),
            "trials": len(each.found.rows),
            "edge": ", ".join(each.edges),
            "error": each.found.failure,
            "folder": each.folder,
        }
        for each in result.each
    ]
    frame = pd.DataFrame(rows)
    for key in (*result.varied, *result.keys):
        if not all(value is None or _is_number(value) for value in (row[key] for row in rows)):
            frame[key] = [None if row[key] is None else str(row[key]) for row in rows]
    return frame


def edges(search: Search, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of which these values are at an edge of what is searched, and beyond which values are valid, too.

    Of choices that are numbers the least and the greatest are an edge, of a range its first and last twentieth.

    Returns:
        by key, where to go on: "below 0.1", "above 10".

    """
    return {
        key: where
        for key, distribution in search.space.items()
        for where, beyond in _beyond(distribution, values[key])
        if _is_valid(search, {**values, key: beyond})
    }


def _beyond(distribution: Distribution, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the edge that a value is at, if it is at one, and a value a little beyond."""
    if isinstance(distribution, Choice):
        known = list(distribution.values)
        if len(known) < 2 or not all(map(_is_number, known)):
            return
        low, high = min(known), max(known)
        first, last = low, high
    else:
        low, high = distribution.at(0.0), distribution.at(1 - 1e-12)
        exact = distribution.whole or distribution.step is not None
        first, last = (low, high) if exact else (distribution.at(NEAR), distribution.at(1 - NEAR))
    whole = all(isinstance(each, int) for each in (low, high, value))
    if value <= first:
        yield f"below {number(low)}", low - 1 if whole else low * 0.99 if low > 0 else low - 0.01 * (high - low)
    elif value >= last:
        yield f"above {number(high)}", high + 1 if whole else high * 1.01 if high > 0 else high + 0.01 * (high - low)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_valid(search: Search, values: Mapping[str, Any]) -> bool:
    try:
        C.with_overrides(search.base, values)
    except ConfigError:
        return False
    return True


def _best(config: Config, results: Sequence[Result]) -> str | None:
    """Return the configuration that was given with a label of ``compare`` for each winner, to be run as it is."""
    top = C.with_overrides(config, {"tune": None, "compare": None, "vary": None})
    compare, about = {}, []
    for (point, search), result, trials in results:
        best = winner(trials)
        if best is None:
            about.append(f"# {point.name}: no winner: all trials failed.")
            continue
        row = result.rows[best.number]
        about.append(
            f"# {point.name}: trial {best.number}: {result.metric} {row['value']:.6g} after {row['rounds']} rounds."
        )
        compare[point.name] = _entry(config, top, point, C.with_overrides(search.config, {**best.values, "tune": None}))
    if not compare:
        return None
    whole = C.with_overrides(top, {"compare": compare}).model_dump(mode="json", exclude_unset=True)
    given = {key: value for key, value in whole.items() if value is not None or key not in ("tune", "vary")}
    return "\n".join([*about, dump(given)])


def _entry(config: Config, top: Config, point: grids.Trial, best: Config) -> dict[str, Any]:
    """Return the overrides that make a winner's configuration of what all share: what its search set, and all that differs."""
    shared, mine = (dict(leaves(_apart(each, exclude_unset=True))) for each in (top, best))
    assert point.config.tune is not None
    named = tuple(f"{key}." for key in (*own(config, point), *point.point, *point.config.tune.search))
    entry = {
        key: value
        for key, value in mine.items()
        if f"{key}.".startswith(named) or key not in shared or shared[key] != value
    }
    every = dict(leaves(_apart(best)))
    # An option that is given for all, and that a label has lost by another name or kind, is its default there.
    entry |= {key: every[key] for key in shared if key not in mine and key in every}
    made = C.with_overrides(top, entry)
    return entry | {key: value for key, _, value in differences(_apart(made), _apart(best))}


def _apart(config: Config, **how: Any) -> dict[str, Any]:
    return {key: value for key, value in config.model_dump(mode="json", **how).items() if key not in APART}
