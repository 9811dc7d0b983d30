"""The HTML page of a report: headline numbers, tables, figures, configuration. All text from files is escaped."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from fedfleet.report import classes, least_completed, reaching, traps
from fedfleet.report.groups import versions
from fedfleet.report.overview import headline, of_comparison, of_run
from fedfleet.report.picture import Picture
from fedfleet.report.settings import settings
from fedfleet.report.sheet import Grid, blocks, fill
from fedfleet.report.shown import asked_for, parted
from fedfleet.report.study_tables import Target
from fedfleet.report.tables import (
    Run,
    at_equal_traffic,
    by_domain,
    completed_counts,
    domain_columns,
    domain_names,
    told_in,
)
from fedfleet.report.words import MISSING, count, duration, joined, mean_sd, number, quantity, share, whole

WORST_FIRST = ("failed", "interrupted", "stopped", "unknown", "finished")
ORDER = ("Runs", "Learning", "Classes", "Domains", "Clients and messages", "Phases", "Settings")
DOMAINS = 14  # columns of a table, at most


def render(groups: Mapping[str, Sequence[Run]], pictures: Sequence[Picture], target: Target | None = None) -> str:
    """The page as text. `groups` holds the runs by label; every group has at least one.

    Raises ValueError for a target that no run has measured.
    """
    runs = [run for group in groups.values() for run in group]
    several = len(runs) > 1
    open_, folded = parted(
        _metrics(runs), {*asked_for(runs), *([] if target is None else [target.metric.removeprefix("eval/")])}
    )
    shown = [
        ("Runs", _table(groups, open_) if several else None),
        ("Runs", _table(groups, folded, "Other metrics") if several and folded else None),
        ("Runs", None if target is None else reaching.table(groups, target)),
        ("Settings", settings(groups)),
        ("Learning", None),
        *(("Classes", grid) for grid in classes.tables(groups)),
        ("Domains", _domains(groups)),
        ("Clients and messages", None if several else least_completed.table(runs[0])),
        ("Phases", None if several else _phases(runs[0])),
    ]
    statuses = Counter(str(run.summary.get("status") or "unknown") for run in runs)
    return fill(
        title=_title(runs),
        status=_status(statuses),
        status_kind=next((status for status in WORST_FIRST if status in statuses), "unknown"),
        subtitle=f"{len(runs)} runs under {count(len(groups), 'label')}" if several else str(runs[0].path),
        errors=[(_name(run), str(run.summary["error"])) for run in runs if run.summary.get("error")],
        notes=[note for label, group in groups.items() for note in _notes(label, group)],
        cards=_cards(runs),
        told=of_comparison(groups) if several else of_run(runs[0]),
        blocks=blocks(pictures, shown, order=ORDER),
        empty=not any(run.rounds_done for run in runs),
        # Seeds of a label share all but the seed: shown once, for the names tell the seeds.
        configs=_merged((_name(run), _config(run, several)) for run in runs),
        environments=_merged(
            (_name(run), json.dumps(run.environment, indent=2, ensure_ascii=False) if run.environment else "")
            for run in runs
        ),
        several=several,
        command="report",
    )


def _title(runs: Sequence[Run]) -> str:
    def names(section: str, key: str) -> str:
        result = list(dict.fromkeys(str(name) for run in runs if (name := run.get(section, key)) is not None))
        return joined(result) if len(result) <= 4 else f"{len(result)} {section}s"

    labels = list(dict.fromkeys(run.label for run in runs))
    named = names("algorithm", "name")
    algorithms = joined(labels) if not named or 1 < len(labels) <= 4 else named
    parts = [algorithms, names("task", "name"), names("population", "dataset")]
    return " · ".join(filter(None, parts))


def _status(statuses: Mapping[str, int]) -> str:
    if len(statuses) == 1:
        return next(iter(statuses))
    return ", ".join(f"{many} {status}" for status, many in statuses.items())


def _cards(runs: Sequence[Run]) -> list[tuple[str, list[str], str]]:
    """Headline numbers as (name, [value] or [least, greatest] of the runs, remark). Unknown ones are left out."""
    cards: list[tuple[str, list[str], str]] = []

    def add(name: str, values: Iterable[float | None], show: Callable[[float | None], str], remark: str = "") -> None:
        known = [value for value in values if value is not None and math.isfinite(value)]
        if known:
            cards.append((name, list(dict.fromkeys(show(value) for value in (min(known), max(known)))), remark))

    for metric in parted(headline(runs), asked_for(runs))[0][:3]:
        best = [value for run in runs if (value := run.summarised("best", f"eval/{metric}")) is not None]
        spread = " to ".join(dict.fromkeys(number(value) for value in (min(best), max(best)))) if best else ""
        add(f"final {metric}", (run.final(metric) for run in runs), number, f"best {spread}" if best else "")
    for key, title in (("privacy", "epsilon spent"), ("example_privacy", "epsilon of examples")):
        promised = [p for run in runs if (p := run.summary.get(key))]
        told = " or ".join(sorted({f"delta {p['delta']:g}, {p['accounting']}" for p in promised}))
        add(title, (p["epsilon"] for p in promised), number, told)
    steps = [total for run in runs if (total := run.total("client_steps"))]
    remark = f"{quantity(sum(steps) / len(steps))} client steps" + (" a run" if len(runs) > 1 else "") if steps else ""
    add("rounds", (run.rounds_done for run in runs), whole, remark)
    add("floats up", (run.total("floats_up") for run in runs), quantity, "received by the server")
    up, down = (quantity(runs[0].total(count), "B") for count in ("bytes_up", "bytes_down"))
    remark = f"{up} up, {down} down" if len(runs) == 1 else "up and down"
    add("bytes", (_sum(run, "bytes_up", "bytes_down") for run in runs), lambda value: quantity(value, "B"), remark)
    add("virtual time", (run.total("virtual_s") or None for run in runs), duration, "on the simulated fleet")
    seconds = (run.summarised("median_seconds_per_round") for run in runs)
    add("a round takes", seconds, duration, "median wall-clock time")
    asked, heard = (sum(run.total(count) or 0 for run in runs) for count in ("invited", "completed"))
    if asked:
        cards.append(("completed of invited", [share(heard / asked)], f"{heard:,.0f} of {asked:,.0f} invitations"))
    if len(runs) == 1 and (counts := completed_counts(runs[0])):
        heard, size = len(counts[0]), counts[1]
        cards.append(("clients that completed", [share(heard / size)], f"{heard:,} of {size:,}, at least once"))
    return cards


def _table(groups: Mapping[str, Sequence[Run]], metrics: Sequence[str], folded: str = "") -> Grid:
    """The table of labels and metrics, a row a label; folded below a title, if one is given."""
    unit = told_in(run for runs in groups.values() for run in runs)
    show = quantity if unit == "floats" else lambda value: quantity(value, "B")
    equal = {metric: at_equal_traffic(list(groups.values()), metric, unit) for metric in metrics}
    several = any(len(runs) > 1 for runs in groups.values())
    head = ["label", "runs finished", "seeds" if several else "seed"]
    for metric in metrics:
        head.append(f"final {metric}")
        if result := equal[metric]:
            head.append(f"{metric} at {quantity(result[0], 'floats' if unit == 'floats' else 'B')} up")
    worst = {label: traps.worst_recalls(runs) for label, runs in groups.items()}
    head += ["recall of the worst class"] if any(worst.values()) else []
    rows = []
    for place, (label, runs) in enumerate(groups.items()):
        seeds = [str(run.seed) for run in runs if run.seed is not None]
        some = ", ".join(seeds[:8]) + (", …" if len(seeds) > 8 else "")
        done = sum(run.summary.get("status") == "finished" for run in runs)
        row = [label, str(done) if done == len(runs) else f"{done} of {len(runs)}", some or MISSING]
        for metric in metrics:
            row.append(mean_sd([run.final(metric) for run in runs]))
            if result := equal[metric]:
                row.append(mean_sd(result[1][place].tolist()))
        row += [mean_sd([value for _, value in worst[label]])] if any(worst.values()) else []
        row += [_mean_text(runs, f"{unit}_up", show), _mean_text(runs, "virtual_s", duration)]
        rows.append(row)
    head += [f"{unit} up", "virtual time"]
    text = f"Mean ± sample standard deviation over seeds; {unit} and times are means." if several else "Of one seed."
    if any(equal.values()):
        text += (
            f" At equal {unit}: the metric once the server had received as many {unit} as the run that received fewest, "
            "interpolated between evaluations."
        )
    return Grid(head, rows, text, folded, folded=bool(folded))


def _domains(groups: Mapping[str, Sequence[Run]]) -> Grid | None:
    """The table of domains at the last evaluation: a row a label and column of domains.parquet; None for one domain, or many."""
    rows, width = [], 0
    for column in domain_columns(groups):
        for label, runs in groups.items():
            last = [result[max(result)] for run in runs if (result := by_domain(run, column))]
            each = list(itertools.zip_longest(*last, fillvalue=math.nan))
            width = max(width, len(each))
            if each:
                rows.append([f"{column}, {label}" if len(groups) > 1 else column, *map(mean_sd, each)])
    if not 2 <= width <= DOMAINS:
        return None
    names = domain_names(groups)[:width]
    head = ["last evaluation", *names, *(f"domain {k}" for k in range(len(names), width))]
    rows = [row + [MISSING] * (width + 1 - len(row)) for row in rows]
    return Grid(head, rows, "Mean ± sample standard deviation over seeds, if there are several.", "By domain")


def _phases(run: Run) -> Grid | None:
    """The table of phases of one run, None if it has fewer than two: they sum to the rounds."""
    shows = {"invited": whole, "completed": whole, "floats_up": quantity, "floats_down": quantity}
    shown = {name: show for name, show in shows.items() if name in run.phases}
    names = run.phases.get("phase", np.empty(0))
    phases = list(dict.fromkeys(names))
    if len(phases) < 2:
        return None
    rows = [
        [str(phase), *(show(float(np.nansum(run.phases[name][names == phase]))) for name, show in shown.items())]
        for phase in phases
    ]
    head = ["phase", *(name.replace("_", " ") for name in shown)]
    return Grid(head, rows, "Sums over all rounds.")


def _notes(label: str, runs: Sequence[Run]) -> list[str]:
    """Warnings that the runs of a label may not be seeds of one experiment."""
    notes = []
    if mixed := versions([run.environment for run in runs]):
        notes.append(
            f"The runs of “{label}” had several versions of packages, which may change numbers: {'; '.join(mixed)}."
        )
    if len(seeds := [run.seed for run in runs if run.seed is not None]) > len({repr(seed) for seed in seeds}):
        notes.append(f"Some runs of “{label}” have the same seed: their spread understates the spread over seeds.")
    return notes


def _metrics(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(metric for run in runs for metric in run.metrics))


def _sum(run: Run, *counts: str) -> float | None:
    known = [total for count in counts if (total := run.total(count)) is not None]
    return sum(known) if known else None


def _mean_text(runs: Sequence[Run], count: str, show: Callable[[float | None], str]) -> str:
    known = [total for run in runs if (total := run.total(count)) is not None]
    return show(sum(known) / len(known)) if known else MISSING


def _config(run: Run, several: bool) -> str:
    return re.sub(r"(?m)^seed:.*\n?", "", run.config_text) if several else run.config_text


def _name(run: Run) -> str:
    return run.label + (f", seed {run.seed}" if run.seed is not None else "")


def _merged(named: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Equal texts once, under all their names; empty texts not at all."""
    by_text: dict[str, list[str]] = {}
    for name, text in named:
        by_text.setdefault(text, []).append(name)
    return [("; ".join(names), text) for text, names in by_text.items() if text.strip()]
