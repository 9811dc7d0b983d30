"""Traps that a reader of results falls into, in sentences: a constant that does as well, clients that count differently."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedfleet.report.classes import confusion
from fedfleet.report.classes import counted as read_counts
from fedfleet.report.tables import Run, read_table, skipped
from fedfleet.report.words import count, joined, number

COUNT = {"num_examples": "by their examples", "uniform": "alike"}
"""``algorithm.weight`` in words."""
NAMED = 6  # labels whose skipped rounds are told


def constant(run: Run) -> str | None:
    """Say that a classifier is no better than a constant, within two standard errors; None where it is, or nobody knows."""
    table, accuracy = confusion(run), run.final("accuracy")
    if table is None or accuracy is None or not (examples := table.sum()):
        return None
    if not math.isclose(table.diagonal().sum() / examples, accuracy, abs_tol=1e-3):
        return None  # the table is of other examples, such as perturbed ones
    k = int(table.sum(1).argmax())
    share = float(table[k].sum() / examples)
    if accuracy > share + 2 * math.sqrt(share * (1 - share) / examples):
        return None
    always = f"that of always saying class {k} ({number(share)})"
    if accuracy <= share:
        return f"accuracy {number(accuracy)} is no better than {always}"
    return f"accuracy {number(accuracy)} is within two standard errors of {always} on {count(int(examples), 'test example')}"


def of_comparison(groups: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """Yield a sentence for each trap of runs under several labels."""
    yield from filter(None, (skipped_rounds(groups), not_learnt(groups), weights(groups)))


def skipped_rounds(groups: Mapping[str, Sequence[Run]]) -> str | None:
    """Say how many rounds of each label were skipped, answered by too few; None for none."""
    lost = {label: sum(map(skipped, runs)) for label, runs in groups.items()}
    if not (every := sum(lost.values())):
        return None
    done = {label: sum(run.rounds_done for run in runs) for label, runs in groups.items()}
    of = [f"“{label}” {lost[label]:,} of {done[label]:,}" for label in lost if lost[label]]
    told = f": {', '.join(of)}" if len(lost) > 1 and len(of) <= NAMED else ""
    return f"Of {count(sum(done.values()), 'round')} {every:,} were skipped, answered by too few: no answer was used{told}."


def not_learnt(groups: Mapping[str, Sequence[Run]], most: int | None = None) -> str | None:
    """Say which labels have a run that is no better than a constant, and name at most ``most`` of them; None for none."""
    said = {label: [*filter(None, map(constant, runs))] for label, runs in groups.items()}
    found = [
        f"“{label}”{f' in {len(of)} of {len(groups[label])} runs' * (len(groups[label]) > 1)}: {of[0]}"
        for label, of in said.items()
        if of
    ]
    more = [f"and {len(found) - most} more"] if most is not None and len(found) > most else []
    return f"Not clearly learnt: {'; '.join([*found[:most], *more])}." if found else None


def weights(groups: Mapping[str, Sequence[Run]]) -> str | None:
    """Say that labels weight clients differently, where clients have unequal numbers of examples."""
    runs = [run for several in groups.values() for run in several]
    sizes = [run.section("client_examples") for run in runs]
    if all(of and of.get("least") == of.get("most") for of in sizes):
        return None
    if len(how := counted(groups)) < 2:
        return None
    told = "; ".join(f"{weight} in {joined([f'“{label}”' for label in labels])}" for weight, labels in how.items())
    return (
        f"Clients count differently: {told}. Set algorithm.weight to one of them, or the difference may be that alone."
    )


def counted(groups: Mapping[str, Sequence[Run]]) -> dict[str, list[str]]:
    """Return how clients count, in words, and the labels in which they do; without those that have no such choice."""
    how: dict[str, list[str]] = {}
    for label, several in groups.items():
        weight = several[0].get("algorithm", "weight")
        if weight in COUNT:
            how.setdefault(COUNT[weight], []).append(label)
    return how


def worst_recalls(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return of each run that has a table of classes its worst class, and the share of it that is found."""
    tables = [table for run in runs if (table := confusion(run)) is not None]
    return [worst for table in tables if (worst := worst_class(table)) is not None]


def worst_class_of(folder: Path) -> tuple[int, float] | None:
    """Return ``worst_class`` of a run folder; None where it has no table of classes. Raises ConfigError for a damaged one."""
    table = read_counts(read_table(folder / "classes.parquet"))
    return None if table is None else worst_class(table)


def worst_class(table: np.ndarray) -> tuple[int, float] | None:
    """Return the class of which the least share is found, and that share; of a table of ``confusion``."""
    of = table.sum(1)
    if not (known := of > 0).any():
        return None
    shares = np.where(known, table.diagonal() / np.where(known, of, 1), np.inf)
    return int(shares.argmin()), float(shares.min())
