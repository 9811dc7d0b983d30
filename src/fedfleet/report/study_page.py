"""The report of a study: one HTML page that stands alone, and its figures as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedfleet.report.groups import versions
from fedfleet.report.settings import settings
from fedfleet.report.sheet import Grid, blocks, fill, write
from fedfleet.report.significance import LEVEL, Difference, Ranks, difference, holm, recovery
from fedfleet.report.study_tables import DONE, SENT, Frame, Tables, combinations, paired, ranks
from fedfleet.report.words import MISSING, count, joined, mean_sd, number, quantity, share
from fedfleet.simulator.driver.evaluation import less_is_better

NAMED = 12  # points that a sentence names at most; the table has them all


def write_study_report(tables: Tables, out: Path, config: str) -> Path:
    """Write `out/report.html` and the figures below `out/figures`; `config` is the study's configuration as text."""
    from fedfleet.report import study_figures  # here, for matplotlib takes most of a second to import

    drawn = study_figures.draw(tables)
    html = render(tables, drawn, out, config)
    return write(out, html, drawn)


def render(tables: Tables, pictures: Sequence[Any], out: Path, config: str) -> str:
    """The page as text."""
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
        subtitle=f"{' × '.join([*grid, count(seeds, 'seed')])}: {count(len(study), 'trial')} in {out}",
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
    metric = tables.metrics[0]
    for label in tables.labels[:NAMED]:
        of = ended[ended["label"] == label]
        ends = [of[of[key] == value][f"final/{metric}"].mean() for value in (first, last)]
        if np.isfinite(ends).all():
            at = f"{number(ends[0])} at {key} = {_text(first)}, {number(ends[1])} at {_text(last)}"
            yield f"{label}: mean final {metric} {at}."
    yield from gets_back(tables)


class Recovered(NamedTuple):
    """What a value of the first key costs the first label, and the share each other label gets back; NaN where no cost is clear."""

    point: Mapping[str, Any]
    cost: Difference
    of: Mapping[str, float]


def recovered(tables: Tables) -> list[Recovered]:
    """Return it for every value of the first key but the first, which stands for no cost, at every point of the others."""
    key, *others = tables.varied
    base, *values = tables.varied[key]
    first, *labels = tables.labels
    column, result = f"final/{tables.metrics[0]}", []
    sign = -1.0 if less_is_better(tables.metrics[0]) else 1.0
    for point in combinations(tables, others):
        of = _select(tables.study, point)
        by_seed = _by_seed(of, key, column)
        at = lambda label, value, by_seed=by_seed: sign * by_seed(label, value)  # noqa: E731
        for value in values:
            free, lost = at(first, base), at(first, value)
            back = {label: recovery(at(label, value), lost, free) for label in labels}
            result.append(Recovered({key: value, **point}, difference(free - lost), back))
    return result


def gets_back(tables: Tables) -> Iterator[str]:
    """Say where the first key costs the first label most, and who gets how much of it back."""
    first, *labels = tables.labels
    if not labels or not tables.metrics or len(tables.varied[next(iter(tables.varied))]) < 2:
        return
    clear = [each for each in recovered(tables) if each.cost.clear and each.cost.mean > 0]
    if not clear:
        key = next(iter(tables.varied))
        yield f"What {key} costs {first} lies within the spread of the seeds, so nobody can be said to get it back."
        return
    most = max(clear, key=lambda each: each.cost.mean)
    where = joined([f"{key} = {_text(value)}" for key, value in most.point.items()])
    back = {
        label: most.of[label] for label in sorted(labels, key=lambda one: -most.of[one]) if np.isfinite(most.of[label])
    }
    said = joined([f"{label} {_part(part)}" for label, part in list(back.items())[:NAMED]])
    lost = f"{most.cost.mean:.3f} ± {most.cost.half:.3f} of {tables.metrics[0]}"
    yield f"{first} loses most at {where}: {lost}. Of that get back: {said}."


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
    for metric in tables.metrics[:2]:
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
    yield "Results", _results(tables)
    for metric in tables.metrics:
        yield f"Final {metric}", _plane(tables, metric)
    if tables.metrics:
        yield f"What {next(iter(tables.varied))} costs", _costs(tables)
        yield "Who gets it back", _recovery(tables)
        yield "Labels compared", _compared(tables)
        yield "Labels compared", _interaction(tables)
        yield "Labels ranked", _ranking(tables)
    trials = list(zip(tables.study["label"], tables.runs, strict=True))
    of_labels = {label: [run for of, run in trials if run is not None and of == label] for label in tables.labels}
    yield "Settings", settings({label: runs for label, runs in of_labels.items() if runs}, tables.varied)


def _results(tables: Tables) -> Grid:
    metrics, study = tables.metrics, tables.study
    to_target = tables.target is not None and "target/rounds" in study
    head = ["label", *tables.varied, "n"]
    for m in metrics:
        head += [f"final {m}", f"best {m}"]
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
            *(_text(v) for v in point.values()),
            f"{len(done)}" if len(done) == len(of) else f"{len(done)} of {len(of)}",
        ]
        for m in metrics:
            row += [mean_sd(done[f"{part}/{m}"].tolist()) for part in ("final", "best")]
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
    text = "Mean ± sample standard deviation over n seeds. Trials that failed do not count."
    if to_target:
        sent = "floats (up and down)" if tables.sent == SENT[:1] else "bytes"
        text += f" Rounds, {sent} and virtual seconds to the target are means, given only where every seed got there."
    return Grid(head, rows, text)


def _plane(tables: Tables, metric: str) -> Grid | None:
    """Labels against the values of the first key; None where that is a single one, of which the results tell all."""
    key, *others = tables.varied
    if len(tables.labels) < 2 or len(tables.varied[key]) < 2:
        return None
    rows = []
    for label in tables.labels:
        for point in combinations(tables, others):
            of = _select(tables.study[tables.study["label"] == label], point)
            result = [of[(of[key] == value) & of["status"].isin(DONE)] for value in tables.varied[key]]
            rows.append([label, *map(_text, point.values()), *(mean_sd(f[f"final/{metric}"].tolist()) for f in result)])
    text = f"Final {metric} by {key}: mean ± sample standard deviation over seeds."
    return Grid(["label", *others, *map(_text, tables.varied[key])], rows, text)


def finals(tables: Tables) -> tuple[list[str], list[list[str]]]:
    """Return what a terminal shows of the table of results, its final metrics: head and rows."""
    result = _results(tables)
    first = len(tables.varied) + 2  # label, what varies, n
    keep = [i for i, name in enumerate(result.head) if i < first or name.startswith(("final ", "reached "))]
    return [result.head[i] for i in keep], [[str(row[i]) for i in keep] for row in result.rows]


def _costs(tables: Tables) -> Grid | None:
    """Paired over seeds: each value of the first key less the first of its values."""
    key, *others = tables.varied
    base, *values = tables.varied[key]
    if not values:
        return None
    metric, heads, result = tables.metrics[0], [], []
    for label in tables.labels:
        for point in combinations(tables, others):
            of = _select(tables.study[tables.study["label"] == label], point)
            heads.append([label, *map(_text, point.values())])
            result.append([paired(of[of[key] == v], of[of[key] == base], f"final/{metric}") for v in values])
    text = f"Final {metric} less that at {key} = {_text(base)}, {_PAIRED}"
    return Grid(["label", *others, *map(_text, values)], _tested(heads, result), text)


def _recovery(tables: Tables) -> Grid | None:
    """The share of what the first label loses that each other label gets back."""
    first, *labels = tables.labels
    if not labels or len(tables.varied[next(iter(tables.varied))]) < 2:
        return None
    rows = [
        [*map(_text, each.point.values()), _cell(each.cost, 1.0), *(_part(each.of[label]) for label in labels)]
        for each in recovered(tables)
    ]
    text = (
        f"What each label gets back of what {first} loses in final {tables.metrics[0]}: 100 % where it loses nothing. Given where "
        f"the 95 % interval of the loss leaves out 0."
    )
    return Grid([*tables.varied, f"{first} loses", *labels], rows, text)


def _part(value: float) -> str:
    return f"{100 * value:.0f} %" if np.isfinite(value) else MISSING


def _compared(tables: Tables) -> Grid | None:
    """Paired over seeds: each label less the first one."""
    first, *labels = tables.labels
    if not labels:
        return None
    metric, heads, result = tables.metrics[0], [], []
    for point in combinations(tables, list(tables.varied)):
        of = _select(tables.study, point)
        heads.append([*map(_text, point.values())])
        base = of[of["label"] == first]
        result.append([paired(of[of["label"] == label], base, f"final/{metric}") for label in labels])
    text = f"Final {metric} of each label less that of {first}, {_PAIRED}"
    return Grid([*tables.varied, *labels], _tested(heads, result), text)


def _interaction(tables: Tables) -> Grid | None:
    """Differences of differences, paired over seeds: what the first key costs each label less what it costs the first label."""
    key, *others = tables.varied
    base, *values = tables.varied[key]
    first, *labels = tables.labels
    if not values or not labels:
        return None
    metric, heads, result = tables.metrics[0], [], []
    for label in labels:
        for point in combinations(tables, others):
            of = _select(tables.study, point)
            heads.append([label, *map(_text, point.values())])
            result.append([_doubly(of, key, value, base, label, first, f"final/{metric}") for value in values])
    text = (
        f"What each label gains from {key} = {_text(base)} to another value, less what {first} gains, in final {metric}: 0 where "
        f"it costs both alike; {_PAIRED}"
    )
    return Grid(["label", *others, *map(_text, values)], _tested(heads, result), text)


def _by_seed(of: Frame, key: str, column: str) -> Callable[[str, Any], np.ndarray]:
    """Return what gives a column of a label at a value of the key (seeds,), NaN where there is none."""
    by = of.set_index(["label", key, "seed"])[column].astype(float)
    seeds = sorted(set(of["seed"]))
    return lambda label, value: np.array([by.get((label, value, seed), np.nan) for seed in seeds])


def _doubly(of: Frame, key: str, value: Any, base: Any, label: str, first: str, column: str) -> np.ndarray:
    at = _by_seed(of, key, column)
    return (at(label, value) - at(label, base)) - (at(first, value) - at(first, base))


_PAIRED = (
    "paired by seed: mean ± half the width of its 95 % t-interval. A * marks p below 0.05 after Holm's correction for all "
    "differences of this table; the intervals are not widened."
)


def _tested(heads: Sequence[Sequence[str]], values: Sequence[Sequence[np.ndarray]]) -> list[list[str]]:
    """Return rows of cells, with a star where Holm's correction over the whole table leaves a difference significant."""
    rows = [[difference(cell) for cell in row] for row in values]
    adjusted = iter(holm([cell.p for row in rows for cell in row]))
    return [[*head, *(_cell(cell, next(adjusted)) for cell in row)] for head, row in zip(heads, rows, strict=True)]


def _cell(result: Difference, p: float) -> str:
    if not np.isfinite(result.mean):
        return MISSING
    star = " *" if p < LEVEL else ""
    return f"{result.mean:+.3f}" + (f" ± {result.half:.3f}{star}" if np.isfinite(result.half) else "")


def _ranking(tables: Tables) -> Grid | None:
    result = ranks(tables, tables.metrics[0])
    if result is None:
        return None
    rows = [[tables.labels[i], f"{result.mean[i]:.2f}"] for i in result.order]
    return Grid(["label", "mean rank"], rows, _verdict(tables, result), words=True)


def _verdict(tables: Tables, result: Ranks) -> str:
    """Say in words what ranks show, or that they show nothing."""
    test = (
        f"Friedman's test over {result.conditions} conditions: chi-square {result.statistic:.2f}, p = {result.p:.2g}."
    )
    if result.p >= LEVEL:
        return f"{test} That does not tell the labels apart: their order may be chance."
    best, last = result.order[0], result.order[-1]
    near = [i for i in result.order[1:] if result.mean[i] - result.mean[best] <= result.distance]
    apart = f"Mean ranks that differ by more than {result.distance:.2f} differ (Nemenyi, 5 %)."
    if last in near:
        return f"{test} {apart} No two labels do: more conditions are needed to say which."
    with_it = f", and cannot be told from {joined([tables.labels[i] for i in near])}" if near else ", before all others"
    return f"{test} {apart} {tables.labels[best]} ranks first{with_it}."


def _points(tables: Tables) -> Iterator[tuple[str, dict[str, Any], Frame]]:
    """Every label at every combination of values, and its trials."""
    for label in tables.labels:
        of = tables.study[tables.study["label"] == label]
        for point in combinations(tables, list(tables.varied)):
            yield label, point, _select(of, point)


def _select(rows: Frame, point: dict[str, Any]) -> Frame:
    for key, value in point.items():
        rows = rows[rows[key] == value]
    return rows


def _name(tables: Tables, row: Any) -> str:
    return ", ".join(
        [row["label"], *(f"{k.split('.')[-1]} = {_text(row[k])}" for k in tables.varied), f"seed {row['seed']}"]
    )


def _said(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
