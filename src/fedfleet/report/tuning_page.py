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


def write_tuning_report(result: Findings, out: Path, config: str) -> Path:
    """Write `out/report.html` and the figures below `out/figures`; `config` is what was given, as text."""
    from fedfleet.report import tuning_figures  # here, for matplotlib takes most of a second to import

    drawn = tuning_figures.draw(result)
    return write(out, render(result, drawn, out, config), drawn)


def render(result: Findings, pictures: Sequence[Any], out: Path, config: str) -> str:
    """The page as text."""
    failed = [row for row in result.rows if row["state"] == "failed"]
    errors: dict[str, list[str]] = {}
    for row in failed:
        errors.setdefault(str(row["error"]), []).append(str(row["trial"]))
    best = [] if result.best is None else [("best.yaml", result.best)]
    status = "failed" if result.winner is None else f"{len(failed)} failed" if len(failed) else "finished"
    return fill(
        title=f"Tuning: {result.metric}",
        status=status,
        status_kind="finished" if status == "finished" else "failed",
        subtitle=f"{len(result.rows)} trials, {SEARCHERS[result.searcher]}; {_about(result)}; in {out}",
        errors=[(f"{len(names)} failed", f"trial {', '.join(names)}:\n{text}") for text, names in errors.items()],
        notes=list(_notes(result)),
        cards=list(_cards(result)),
        told=list(_told(result)),
        blocks=blocks(pictures, _tables(result), order=("The winner", "Learning", "What matters", "Trials")),
        empty=False,
        configs=[*best, ("tune.yaml", config)],
        environments=[],
        several=True,
        command="tune",
    )


def _told(result: Findings) -> Iterator[str]:
    """What was tried, what won, and what it cost."""
    keys = joined(list(result.keys))
    trials = f"{len(result.rows)} trials of {keys}"
    yield f"{trials}, {SEARCHERS[result.searcher]}, on {count(len(result.seeds), 'seed')}; {_about(result)}."
    if result.winner is None:
        yield "Every trial failed."
        return
    row = result.rows[result.winner]
    chosen = joined([f"{key} = {number(row[key])}" for key in result.keys])
    value = f"{result.metric} is {number(row['value'])}, the {result.of} of {row['rounds']} rounds"
    yield f"Trial {result.winner} won, with {chosen}: its {value}."
    yield _spent(result)


def _spent(result: Findings) -> str:
    return f"{result.spent[0].upper()}{result.spent[1:]}."


def _about(result: Findings) -> str:
    some = (
        f", one in {result.reduction}, after {joined([str(r) for r in result.rungs[:-1]])} of {result.rungs[-1]} rounds"
    )
    return ABOUT[result.scheduler] + (some if len(result.rungs) > 1 else "")


def _notes(result: Findings) -> Iterator[str]:
    yield f"{result.metric} is of {result.measured_on}." + (f" {result.warning}" if result.on_test else "")
    if len(result.seeds) == 1:
        yield "Each trial ran on one seed: what is close may be chance."


def _cards(result: Findings) -> Iterator[tuple[str, list[str], str]]:
    states = Counter(row["state"] for row in result.rows)
    said = ", ".join(f"{states[s]} {s}" for s in ("complete", "stopped", "failed") if s in states)
    yield "trials", [str(len(result.rows))], said
    if result.winner is not None:
        row = result.rows[result.winner]
        yield f"best {result.metric}", [number(row["value"])], f"trial {result.winner}, {row['rounds']} rounds"
        for key in result.keys:
            yield key, [number(row[key])], "of the winner"
    (rounds, whole), (size, everything) = result.cost["rounds"], result.cost["bytes"]
    yield "rounds", [f"{rounds:,}"], f"{share(rounds / whole)} of {whole:,} for all in full"
    yield "sent, up and down", [quantity(size, "B")], f"{quantity(everything, 'B')} for all in full"


def _tables(result: Findings) -> Iterator[tuple[str, Grid]]:
    yield "Trials", _trials(result)
    if result.final:
        rows = [[name.removeprefix("eval/"), number(value)] for name, value in result.final.items()]
        text = f"After its last round{', means over seeds' if len(result.seeds) > 1 else ''}."
        yield "The winner", Grid(["metric", "value"], rows, text)
    if result.importances:
        rows = [[key, share(value)] for key, value in result.importances.items()]
        text = (
            f"Share of the variance of {result.metric} after {result.rungs[0]} rounds, where all trials can be compared, that a "
            f"key explains (functional ANOVA on a random forest). With few trials it is a hint."
        )
        yield "What matters", Grid(["key", "importance"], rows, text)


def _trials(result: Findings) -> Grid:
    after = [f"after/{rounds}" for rounds in result.rungs]
    head = ["trial", *result.keys, "state", "rounds", *(f"after {rounds}" for rounds in result.rungs), "sent"]
    rows = [
        [
            f"{row['trial']}",
            *(number(row[key]) for key in result.keys),
            result.state(row),
            f"{row['rounds']}",
            *(number(row[column]) for column in after),
            quantity(row["bytes"], "B"),
        ]
        for row in result.ranked()
    ]
    best = {"last": "the last", "best": "the best so far"}[result.of]
    seeds = f", mean over {len(result.seeds)} seeds" if len(result.seeds) > 1 else ""
    text = f"{result.metric} ({best}{seeds}) at each rung; those that went furthest first. {_spent(result)}"
    return Grid(head, rows, text)
