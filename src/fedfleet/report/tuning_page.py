"""The report of a search for hyper-parameters: one HTML page that stands alone, and its figures as PNG files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedfleet.report.sheet import Grid, blocks, fill, write
from fedfleet.report.tuning_tables import Findings
from fedfleet.report.words import count, joined, number, quantity, share

ABOUT = {
    "sha": "successive halving: at each rung the best of all that had come there went on",
    "asha": "asynchronous successive halving: a trial went on where it was among the best of those that had come there so far",
    "none": "every trial in full",
}
SEARCHERS = {"random": "drawn at random", "grid": "a grid", "tpe": "drawn by Optuna's TPE"}


def write_tuning_report(found: Findings, out: Path, config: str) -> Path:
    """Write `out/report.html` and the figures below `out/figures`; `config` is what was given, as text."""
    from fedfleet.report import tuning_figures  # here, for matplotlib takes most of a second to import

    drawn = tuning_figures.draw(found)
    return write(out, render(found, drawn, out, config), drawn)


def render(found: Findings, pictures: Sequence[Any], out: Path, config: str) -> str:
    """The page as text."""
    failed = [row for row in found.rows if row["state"] == "failed"]
    errors: dict[str, list[str]] = {}
    for row in failed:
        errors.setdefault(str(row["error"]), []).append(str(row["trial"]))
    best = [] if found.best is None else [("best.yaml", found.best)]
    status = "failed" if found.winner is None else f"{len(failed)} failed" if len(failed) else "finished"
    return fill(
        title=f"Tuning: {found.metric}",
        status=status,
        status_kind="finished" if status == "finished" else "failed",
        subtitle=f"{len(found.rows)} trials, {SEARCHERS[found.searcher]}; {_about(found)}; in {out}",
        errors=[(f"{len(names)} failed", f"trial {', '.join(names)}:\n{text}") for text, names in errors.items()],
        notes=list(_notes(found)),
        cards=list(_cards(found)),
        told=list(_told(found)),
        blocks=blocks(pictures, _tables(found), order=("The winner", "Learning", "What matters", "Trials")),
        empty=False,
        configs=[*best, ("tune.yaml", config)],
        environments=[],
        several=True,
        command="tune",
    )


def _told(found: Findings) -> Iterator[str]:
    """What was tried, what won, and what it cost."""
    keys = joined(list(found.keys))
    yield f"{len(found.rows)} trials of {keys}, {SEARCHERS[found.searcher]}, on {count(len(found.seeds), 'seed')}; {_about(found)}."
    if found.winner is None:
        yield "Every trial failed."
        return
    row = found.rows[found.winner]
    chosen = joined([f"{key} = {number(row[key])}" for key in found.keys])
    value = f"{found.metric} is {number(row['value'])}, the {found.of} of {row['rounds']} rounds"
    yield f"Trial {found.winner} won, with {chosen}: its {value}."
    yield _spent(found)


def _spent(found: Findings) -> str:
    return f"{found.spent[0].upper()}{found.spent[1:]}."


def _about(found: Findings) -> str:
    some = f", one in {found.reduction}, after {joined([str(r) for r in found.rungs[:-1]])} of {found.rungs[-1]} rounds"
    return ABOUT[found.scheduler] + (some if len(found.rungs) > 1 else "")


def _notes(found: Findings) -> Iterator[str]:
    yield f"{found.metric} is of {found.measured_on}." + (f" {found.warning}" if found.on_test else "")
    if len(found.seeds) == 1:
        yield "Each trial ran on one seed: what is close may be chance."


def _cards(found: Findings) -> Iterator[tuple[str, list[str], str]]:
    states = Counter(row["state"] for row in found.rows)
    said = ", ".join(f"{states[s]} {s}" for s in ("complete", "stopped", "failed") if s in states)
    yield "trials", [str(len(found.rows))], said
    if found.winner is not None:
        row = found.rows[found.winner]
        yield f"best {found.metric}", [number(row["value"])], f"trial {found.winner}, {row['rounds']} rounds"
        for key in found.keys:
            yield key, [number(row[key])], "of the winner"
    (rounds, whole), (size, everything) = found.cost["rounds"], found.cost["bytes"]
    yield "rounds", [f"{rounds:,}"], f"{share(rounds / whole)} of {whole:,} for all in full"
    yield "sent, up and down", [quantity(size, "B")], f"{quantity(everything, 'B')} for all in full"


def _tables(found: Findings) -> Iterator[tuple[str, Grid]]:
    yield "Trials", _trials(found)
    if found.final:
        rows = [[name.removeprefix("eval/"), number(value)] for name, value in found.final.items()]
        text = f"After its last round{', means over seeds' if len(found.seeds) > 1 else ''}."
        yield "The winner", Grid(["metric", "value"], rows, text)
    if found.importances:
        rows = [[key, share(value)] for key, value in found.importances.items()]
        text = (
            f"Share of the variance of {found.metric} after {found.rungs[0]} rounds, where all trials can be compared, that a key "
            f"explains (functional ANOVA on a random forest). With few trials it is a hint."
        )
        yield "What matters", Grid(["key", "importance"], rows, text)


def _trials(found: Findings) -> Grid:
    after = [f"after/{rounds}" for rounds in found.rungs]
    head = ["trial", *found.keys, "state", "rounds", *(f"after {rounds}" for rounds in found.rungs), "sent"]
    rows = [
        [
            f"{row['trial']}",
            *(number(row[key]) for key in found.keys),
            found.state(row),
            f"{row['rounds']}",
            *(number(row[column]) for column in after),
            quantity(row["bytes"], "B"),
        ]
        for row in found.ranked()
    ]
    best = {"last": "the last", "best": "the best so far"}[found.of]
    seeds = f", mean over {len(found.seeds)} seeds" if len(found.seeds) > 1 else ""
    text = f"{found.metric} ({best}{seeds}) at each rung; those that went furthest first. {_spent(found)}"
    return Grid(head, rows, text)
