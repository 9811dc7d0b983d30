"""The report of a study: one HTML page that stands alone, and its figures as PNG files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedfleet.report import traps, variance
from fedfleet.report.groups import versions
from fedfleet.report.settings import settings
from fedfleet.report.sheet import Grid, blocks, fill, write
from fedfleet.report.study_comparisons import gets_back, grids, verdict
from fedfleet.report.study_tables import DONE, SENT, WORST, Frame, Tables, combinations, selected
from fedfleet.report.tables import Run
from fedfleet.report.words import MISSING, count, joined, mean_sd, number, plain_value, quantity, share

NAMED = 12  # points that a sentence names at most; the table has them all
SERVED_WORST = "recall of the worst class"


def write_study_report(tables: Tables, out: Path, config: str, folder: Path | None = None) -> Path:
    """Write `out/report.html` and the figures below `out/figures`.

    `config` is the study's configuration as text; `folder` that of the trials, `out` if not given.
    """
    from fedfleet.report import study_figures  # here, for matplotlib takes most of a second to import

    drawn = study_figures.draw(tables)
    html = render(tables, drawn, folder or out, config)
    return write(out, html, drawn)


def render(tables: Tables, pictures: Sequence[Any], folder: Path, config: str) -> str:
    """The page as text; `folder` is that of the trials."""
    study, key = tables.study, next(iter(tables.varied))
    failed = study[~study["status"].isin(DONE)]
    errors: dict[str, list[str]] = {}
    for _, row in failed.iterrows():
        errors.setdefault(str(row["error"]), []).append(_name(tables, row))
    seeds = study["seed"].nunique()
    grid = [count(len(tables.labels), "label"), *(f"{len(v)} values of {k}" for k, v in tables.varied.items())]
    return fill(
        title=f"Study: {joined(tables.metrics[:1]) or 'nothing measured'} against {key}",
        status="failed" if len(failed) == len(study) else f"{len(failed)} failed" if len(failed) else "finished",
        status_kind="failed" if len(failed) else "finished",
        subtitle=f"{' × '.join([*grid, count(seeds, 'seed')])}: {count(len(study), 'trial')} in {folder}",
        errors=[
            (f"{count(len(names), 'trial')} failed", f"{'; '.join(names)}:\n{text}") for text, names in errors.items()
        ],
        notes=list(_notes(tables)),
        cards=_cards(tables, len(failed)),
        told=list(_told(tables)),
        blocks=blocks(pictures, _tables(tables), order=("Learning", "Results")),
        empty=False,
        configs=[("study", config)],
        environments=[],
        several=True,
        command="study",
    )


def _told(tables: Tables) -> Iterator[str]:
    """What was tried, and what the first varied key does to each label."""
    study, key = tables.study, next(iter(tables.varied))
    ended = study[study["status"].isin(DONE)]
    seeds = count(study["seed"].nunique(), "seed")
    keys = joined([f"{len(values)} values of {k}" for k, values in tables.varied.items()])
    done = f"{len(ended)} of {count(len(study), 'trial')} came to their end"
    yield f"{joined(tables.labels)} were tried at {keys}, on {seeds}; {done}."
    first, *_, last = [*tables.varied[key], None] if len(tables.varied[key]) < 2 else tables.varied[key]
    if last is None or not tables.metrics:
        return
    metric, others = tables.metrics[0], list(tables.varied)[1:]
    over = f" over all values of {joined(others)}" if others else ""
    for label in tables.labels[:NAMED]:
        of = ended[ended["label"] == label]
        each = [of[of[key] == value][f"final/{metric}"].dropna() for value in (first, last)]
        if all(map(len, each)):
            of_runs = [f" ({count(len(one), 'run')})" if len(each[0]) != len(each[1]) else "" for one in each]
            at = f"{number(each[0].mean())}{of_runs[0]} at {key} = {plain_value(first)}"
            yield f"{label}: mean final {metric}{over} {at}, {number(each[1].mean())}{of_runs[1]} at {plain_value(last)}."
    yield from answers(tables)


def answers(tables: Tables) -> Iterator[str]:
    """Say who gets back what the first key costs the reference; rank the labels, or say that none can; name traps.

    The last sentence says what intervals hold.
    """
    yield from gets_back(tables)
    if (said := verdict(tables)) is not None:
        yield said
    yield from _traps(tables)
    if (varies := variance.held([run for run in tables.runs if run is not None])) is not None:
        yield varies


def _traps(tables: Tables) -> Iterator[str]:
    """Say at which points a label learnt nothing, and that labels weight clients differently."""
    of_points: dict[str, list[Run]] = {}
    of_labels: dict[str, list[Run]] = {}
    for (_, row), run in zip(tables.study.iterrows(), tables.runs, strict=True):
        if run is not None:
            of_points.setdefault(_point(tables, row), []).append(run)
            of_labels.setdefault(row["label"], []).append(run)
    yield from filter(
        None, (traps.skipped_rounds(of_labels), traps.not_learnt(of_points, NAMED), traps.weights(of_labels))
    )


def never(tables: Tables) -> list[tuple[str, int, int]]:
    """Where the target was not always reached: the name of the point, seeds that never did, seeds that ended."""
    if tables.target is None or "target/rounds" not in tables.study:
        return []
    result = []
    for label, point, rows in _points(tables):
        ended = rows[rows["status"].isin(DONE)]
        short = int(ended["target/rounds"].isna().sum())
        if short:
            result.append(
                (", ".join([label, *(f"{k.split('.')[-1]} = {v}" for k, v in point.items())]), short, len(ended))
            )
    return result


def _notes(tables: Tables) -> Iterator[str]:
    if mixed := versions([run.environment for run in tables.runs if run is not None]):
        yield f"The trials had several versions of packages, which may change numbers: {'; '.join(mixed)}."
    missed = never(tables)
    whole = [name for name, short, seeds in missed if short == seeds]
    some = [f"{name} ({short} of {seeds} seeds)" for name, short, seeds in missed if short < seeds]
    if whole:
        yield f"Never reached {tables.target}, on any seed: {_some(whole)}."
    if some:
        yield f"Did not reach {tables.target} on some seeds: {_some(some)}."
    if tables.study["seed"].nunique() < 2:
        yield "There is one seed: no spread can be told, and a difference may be chance."
    late: Any = tables.study.get("aborted_attempts", pd.Series(dtype="Int64"))
    if late.sum() > 0:
        yield (
            f"{int(late.sum()):,} attempts at rounds were aborted, answered by too few; their time and traffic count, and the "
            f"rounds were tried again."
        )


def _some(names: Sequence[str]) -> str:
    more = f"; and {len(names) - NAMED} more, in the table below" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more


def _cards(tables: Tables, failed: int) -> list[tuple[str, list[str], str]]:
    study = tables.study
    cards = [("trials", [str(len(study))], f"{len(study) - failed} ended, {failed} failed")]
    for metric in tables.parted[0][:2]:
        values = study[f"final/{metric}"].dropna()
        if len(values):
            ends = dict.fromkeys(number(v) for v in (values.min(), values.max()))
            cards.append((f"final {metric}", list(ends), "of a single trial"))
    if tables.target is not None and "target/rounds" in study:
        there = int(study["target/rounds"].notna().sum())
        cards.append((f"reached {tables.target}", [f"{there} of {len(study)}"], "trials"))
    if "never_completed" in study and study["never_completed"].notna().any():
        ends = dict.fromkeys(share(v) for v in (study["never_completed"].min(), study["never_completed"].max()))
        cards.append(("never completed", list(ends), "share of the clients"))
    return cards


def _tables(tables: Tables) -> Iterator[tuple[str, Grid | None]]:
    shown, folded = tables.parted
    yield "Results", _results(tables, shown)
    if folded:
        yield "Results", _results(tables, folded)._replace(title="Other metrics", folded=True)
    for metric in shown:
        yield f"Final {metric}", _plane(tables, metric)
    for metric in folded:
        if (plane := _plane(tables, metric)) is not None:
            yield f"Final {shown[0]}", plane._replace(title=f"Final {metric}", folded=True)
    if tables.metrics:
        yield from grids(tables)
    trials = list(zip(tables.study["label"], tables.runs, strict=True))
    of_labels = {label: [run for of, run in trials if run is not None and of == label] for label in tables.labels}
    yield "Settings", settings({label: runs for label, runs in of_labels.items() if runs}, tables.varied)


def _results(tables: Tables, metrics: Sequence[str]) -> Grid:
    study = tables.study
    to_target = tables.target is not None and "target/rounds" in study
    head = ["label", *tables.varied, "n"]
    for m in metrics:
        head += [f"final {m}", f"best {m}"]
    worst = WORST in study
    head += [SERVED_WORST] * worst
    if to_target:
        head += [
            f"reached {tables.target}",
            "rounds to it",
            *(f"{_said(name)} to it" for name in tables.sent),
            "virtual s to it",
        ]
    head += ["completed of invited", "Gini", "never completed"]
    rows = []
    for label, point, of in _points(tables):
        done = of[of["status"].isin(DONE)]
        row = [
            label,
            *(plain_value(v) for v in point.values()),
            f"{len(done)}" if len(done) == len(of) else f"{len(done)} of {len(of)}",
        ]
        for m in metrics:
            row += [mean_sd(done[f"{part}/{m}"].tolist()) for part in ("final", "best")]
        row += [mean_sd(done[WORST].tolist())] if worst else []
        if to_target:
            there = done[done["target/rounds"].notna()]
            row.append(f"{len(there)} of {len(done)}")
            columns = (
                ("target/rounds", number),
                *((f"target/{name}", quantity) for name in tables.sent),
                ("target/virtual_s", number),
            )
            row += [show(there[c].mean()) if len(there) == len(done) and len(done) else MISSING for c, show in columns]
        if "gini" in of:
            row.append(share(done["completed_share"].mean()) if len(done) else MISSING)
            row += [number(done["gini"].mean()), share(done["never_completed"].mean()) if len(done) else MISSING]
        else:
            row += [MISSING] * 3
        rows.append(row)
    over = f"{_over_seeds(tables, 'n seeds')}. " if metrics else ""
    text = f"{over}Trials that failed do not count."
    if to_target:
        sent = "floats (up and down)" if tables.sent == SENT[:1] else "bytes"
        text += f" Rounds, {sent} and virtual seconds to the target are means over n seeds, given only where every seed got there."
    return Grid(head, rows, text)


def _over_seeds(tables: Tables, seeds: str = "seeds") -> str:
    """Return what results are of."""
    return f"Mean ± sample standard deviation over {seeds}" if tables.study["seed"].nunique() > 1 else "Of one seed"


def to_target(tables: Tables) -> Grid | None:
    """Return what it cost to reach the target, of the results; None without one."""
    if tables.target is None or "target/rounds" not in tables.study:
        return None
    result, first = _results(tables, []), len(tables.varied) + 2
    keep = [
        i for i, name in enumerate(result.head) if i < first or name.endswith(" to it") or name.startswith("reached ")
    ]
    rows = [[row[i] for i in keep] for row in result.rows]
    return result._replace(head=[result.head[i] for i in keep], rows=rows)


def _plane(tables: Tables, metric: str) -> Grid | None:
    """Labels against the values of the first key; None where that is a single one, of which the results tell all."""
    key, *others = tables.varied
    if len(tables.labels) < 2 or len(tables.varied[key]) < 2:
        return None
    rows = []
    for label in tables.labels:
        for point in combinations(tables, others):
            of = selected(tables.study[tables.study["label"] == label], point)
            result = [of[(of[key] == value) & of["status"].isin(DONE)] for value in tables.varied[key]]
            rows.append(
                [label, *map(plain_value, point.values()), *(mean_sd(f[f"final/{metric}"].tolist()) for f in result)]
            )
    text = f"Final {metric} by {key}. {_over_seeds(tables)}."
    return Grid(["label", *others, *map(plain_value, tables.varied[key])], rows, text)


def finals(tables: Tables) -> tuple[list[str], list[list[str]]]:
    """Return what a terminal shows of the table of results, its final metrics and the worst class: head and rows."""
    result = _results(tables, tables.parted[0])
    first = len(tables.varied) + 2  # label, what varies, n
    keep = [
        i for i, name in enumerate(result.head) if i < first or name.startswith(("final ", "reached ", SERVED_WORST))
    ]
    return [result.head[i] for i in keep], [[str(row[i]) for i in keep] for row in result.rows]


def _points(tables: Tables) -> Iterator[tuple[str, dict[str, Any], Frame]]:
    """Every label at every combination of values, and its trials."""
    for label in tables.labels:
        of = tables.study[tables.study["label"] == label]
        for point in combinations(tables, list(tables.varied)):
            yield label, point, selected(of, point)


def _name(tables: Tables, row: Any) -> str:
    return f"{_point(tables, row)}, seed {row['seed']}"


def _point(tables: Tables, row: Any) -> str:
    return ", ".join([row["label"], *(f"{k.split('.')[-1]} = {plain_value(row[k])}" for k in tables.varied)])


def _said(name: str) -> str:
    return name.replace("_", " ")
