"""The report of several searches for hyper-parameters: one HTML page with the winner of each label at each point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedfleet.report.sheet import Grid, blocks, fill, write
from fedfleet.report.tuning_tables import Winner, Winners
from fedfleet.report.words import MISSING, count, joined, number, quantity

NONE = "none"


def write_winners_report(result: Winners, out: Path, config: str) -> Path:
    """Write `out/report.html`; `config` is what was given, as text."""
    return write(out, render(result, out, config), [])


def render(result: Winners, out: Path, config: str) -> str:
    """The page as text."""
    failed = result.failed
    status = f"{len(failed)} failed" if failed else "finished"
    trials = sum(len(each.found.rows) for each in result.each)
    return fill(
        title=f"Tuning: {result.metric}",
        status=status,
        status_kind="failed" if failed else "finished",
        subtitle=f"{count(len(result.each), 'winner')} of {count(trials, 'trial')}; in {out}",
        errors=[(name, text) for name, text in failed.items()],
        notes=list(_notes(result)),
        cards=[],
        told=list(_told(result)),
        blocks=blocks([], _tables(result), order=("Winners",)),
        empty=False,
        configs=[*([] if result.best is None else [("best.yaml", result.best)]), ("tune.yaml", config)],
        environments=[],
        several=True,
        command="tune",
    )


def _notes(result: Winners) -> Iterator[str]:
    first = result.each[0].found
    yield f"{result.metric} is of {first.measured_on}." + (f" {first.warning}" if first.on_test else "")
    if len(first.seeds) == 1:
        yield "Each trial ran on one seed: what is close may be chance."
    for line in result.lost:
        yield f"{line[0].upper()}{line[1:]}."


def _told(result: Winners) -> Iterator[str]:
    labels = list(dict.fromkeys(each.label for each in result.each if each.label))
    at = [f"{count(len(values), 'value')} of {key}" for key, values in result.varied.items()]
    what = joined(labels) if labels else "One label"
    yield f"{what} {'were' if len(labels) > 1 else 'was'} tuned{f' at {joined(at)}' if at else ''}, each by itself."
    for each in result.each:
        if each.row:
            chosen = joined([f"{key} = {number(each.row[key])}" for key in each.found.keys])
            yield f"{each.name}: {chosen}, with {number(each.row['value'])}."
    yield from (f"{line}." for line in result.to_extend)


def head(result: Winners) -> list[str]:
    """Return the columns of the table of winners."""
    return ["search", *result.keys, result.metric, "trial", "trials", "at an edge"]


def cells(result: Winners, each: Winner) -> list[str]:
    """Return the cells of a winner."""
    values = [number(each.row.get(key)) if key in each.found.keys else MISSING for key in result.keys]
    trial = NONE if each.found.winner is None else f"{each.found.winner}"
    edge = ", ".join(each.edges) or (NONE if each.row else MISSING)
    return [each.name, *values, number(each.row.get("value")), trial, f"{len(each.found.rows)}", edge]


def _tables(result: Winners) -> Iterator[tuple[str, Grid]]:
    rows = [[*cells(result, each), quantity(each.found.cost["bytes"][0], "B")] for each in result.each]
    text = (
        "Each search's best trial of those that came furthest. An edge is the least or the greatest value of a grid, or the first "
        "or last twentieth of a range, where values beyond it are valid. The folder of a search has a report of its own."
    )
    yield "Winners", Grid([*head(result), "sent"], rows, text, words=True)
    by_place = {(each.label, _point(each)): each for each in result.each}
    labels, points = (list(dict.fromkeys(place)) for place in zip(*by_place, strict=True))
    if len(labels) > 1 and len(points) > 1:
        marked = [[label, *(_value(by_place[label, point]) for point in points)] for label in labels]
        text = f"{result.metric} of each winner; * is at an edge of its grid."
        yield "Winners", Grid(["label", *points], marked, text, title="By label and point")


def _point(each: Winner) -> str:
    return each.name.removeprefix(each.label).strip()


def _value(each: Winner) -> str:
    return f"{number(each.row.get('value'))}{' *' if each.edges else ''}"
