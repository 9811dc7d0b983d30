"""Findings of a search: a table of its trials, the winner's configuration, what it cost, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedfleet.config import tuning
from fedfleet.config.search import Choice
from fedfleet.experiments import campaign
from fedfleet.files import parquet
from fedfleet.files.documents import dump
from fedfleet.files.summary import SUMMARY, read_summary, summary_of
from fedfleet.files.writing import write_text
from fedfleet.report.meanings import TEST, measured_on
from fedfleet.report.tuning_page import write_tuning_report
from fedfleet.report.tuning_tables import Findings
from fedfleet.simulator.errors import ConfigError
from fedfleet.tuning import searchers
from fedfleet.tuning.schedules import Trial, winner
from fedfleet.tuning.search import Search, folder

TABLE, BEST = "trials.parquet", "best.yaml"


def write(search: Search, trials: Sequence[Trial], out: Path) -> Findings:
    """Write `trials.parquet`, `best.yaml`, if there is a best trial, and `report.html`, and return what is in them."""
    result = collect(search, trials, out)
    parquet.write(pd.DataFrame(result.rows), out / TABLE)
    if result.best is not None:
        write_text(out / BEST, result.best)
    write_tuning_report(result, out, campaign.as_given(search.config))
    return result


def collect(search: Search, trials: Sequence[Trial], out: Path) -> Findings:
    """Return what was found, from the trials and the summaries of their runs.

    Raises ConfigError where that of a run that was measured is damaged or missing.
    """
    best, given = winner(trials), search.given
    summaries = {t.number: [_summary(t, folder(out, t.number, seed)) for seed in search.seeds] for t in trials}
    held_out = search.config.population.held_out
    return Findings(
        rows=[_row(search, t, summaries[t.number]) for t in trials],
        keys=list(search.space),
        log=[key for key, d in search.space.items() if getattr(d, "log", False)],
        choices={key: [_plain(v) for v in d.values] for key, d in search.space.items() if isinstance(d, Choice)},
        metric=given.metric,
        goal=tuning.goal(given),
        of=given.of,
        rungs=search.rungs,
        scheduler=given.scheduler,
        reduction=given.reduction,
        searcher=given.searcher,
        seeds=search.seeds,
        measured_on=measured_on(given.metric, held_out),
        on_test=measured_on(given.metric, held_out) == TEST,
        winner=None if best is None else best.number,
        final={} if best is None else _means(summaries[best.number]),
        best=None if best is None else _best(search, best),
        cost=_cost(search, [s for each in summaries.values() for s in each]),
        importances=searchers.importances(search.space, trials),
    )


def _summary(trial: Trial, run: Path) -> dict[str, Any]:
    if trial.failed:
        return summary_of(run)
    summary, _ = read_summary(run)
    if not summary:
        raise ConfigError(f"{run / SUMMARY}: it is missing: bring back the file that the run wrote")
    return summary


def _row(search: Search, trial: Trial, summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    known = [None if score is None else search.sign * score for score in trial.scores]
    value = next((v for v in reversed(known) if v is not None), None)
    complete = trial.reached == len(search.rungs) - 1
    return {
        "trial": trial.number,
        **{key: _plain(v) for key, v in trial.values.items()},
        "state": "failed" if trial.failed else "complete" if complete else "stopped",
        "rounds": max((s.get("rounds", 0) for s in summaries), default=0),
        "value": value,
        **{
            f"after/{rounds}": v for rounds, v in zip(search.rungs, [*known, *[None] * len(search.rungs)], strict=False)
        },
        "bytes": sum(_bytes(s) for s in summaries),
        "seconds": sum(s.get("seconds") or 0.0 for s in summaries),
        "error": trial.error,
    }


def _plain(value: Any) -> Any:
    """Return a value as a table has it."""
    return value if isinstance(value, int | float | str) else str(value)


def _bytes(summary: dict[str, Any]) -> int:
    return sum(summary.get(key) or 0 for key in ("bytes_up", "bytes_down"))


def _cost(search: Search, summaries: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return rounds and bytes that were spent, beside what all trials would have taken that far: each run at its own pace."""
    runs, rounds = [s for s in summaries if s.get("rounds")], search.config.rounds
    spent = sum(s["rounds"] for s in runs)
    whole = sum(_bytes(s) * rounds / s["rounds"] for s in runs)
    missing = len(summaries) - len(runs)  # they failed before their first round
    scale = 1 + missing / len(runs) if runs else 1
    return {"rounds": (spent, rounds * len(summaries)), "bytes": (sum(map(_bytes, runs)), whole * scale)}


def _means(summaries: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the final metrics of a trial, means over its seeds."""
    names = dict.fromkeys(name for s in summaries for name in s.get("final") or {})
    values = {name: [s["final"].get(name) for s in summaries] for name in names}
    return {name: sum(each) / len(each) for name, each in values.items() if None not in each}


def _best(search: Search, best: Trial) -> str:
    """Return the winner's configuration as it is to be given for a run of its own."""
    score = best.scores[best.reached]
    assert score is not None
    about = f"{search.given.metric} {search.sign * score:.6g} after {search.rungs[best.reached]} rounds"
    return f"# Trial {best.number}: {about}.\n" + dump(search.best(best.values))


def lines(result: Findings) -> Iterator[str]:
    """Yield what is said of a search at its end, beside its table."""
    if result.winner is not None:
        row = result.rows[result.winner]
        values = " ".join(f"{key}={row[key]}" for key in result.keys)
        seeds = f", mean over {len(result.seeds)} seeds" if len(result.seeds) > 1 else ""
        yield f"best: trial {result.winner}: {result.metric} {row['value']:.6g} after {row['rounds']} rounds{seeds}: {values}"
    yield f"{result.metric} is of {result.measured_on}"
    if result.on_test:
        yield result.warning
    yield result.spent
