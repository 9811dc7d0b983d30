"""Contents of run folders, read into memory, and the arithmetic that a report does on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from fedfleet.files import parquet
from fedfleet.files.documents import YAML_BYTES, json_of, parse, text_of
from fedfleet.files.summary import KEPT, MODELS, TABLES, TOLD, check_files, read_summary
from fedfleet.report.curves import Curve, at
from fedfleet.simulator.errors import ConfigError, one_line

Table = dict[str, np.ndarray]  # columns (n,): float64 with nan for null, or str objects
COUNTS = ("seconds", "invited", "completed", "stale", "merged_stale", "late", "failed", "unavailable", "client_steps")
COUNTS += ("floats_up", "floats_down", "bytes_up", "bytes_down", "virtual_s")
OUTCOMES = ("completed", "stale", "late", "failed", "unavailable")


OF_RUNS = tuple(name.removesuffix(".parquet") for name in TABLES)
"""Tables of a run folder."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder says. Tables that are missing are empty, sections that are missing are `{}`.

    `rounds` is sorted by round and has, beside the file's columns, `completed` (rounds done, so round + 1) and
    `total/<count>` (the cumulative sum of each count in `COUNTS`). The other tables are as on disk.
    """

    path: Path
    label: str
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    rounds: Table
    phases: Table
    outcomes: Table
    clients: Table
    domains: Table
    classes: Table
    recall: Table

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that were evaluated at least once, in the order of the summary and the table."""
        known = [name for section in ("initial", "final") for name in self.section(section)]
        columns = [c for c in self.rounds if c.startswith("eval/") and np.isfinite(self.rounds[c]).any()]
        return list(dict.fromkeys(c.removeprefix("eval/") for c in (*known, *columns)))

    def curve(self, column: str, against: str) -> Curve:
        """Two float arrays (n,) of the rows where both columns are finite; n = 0 if either column is missing.

        Before round 0, at x = 0, a metric is the initial model's and a total is 0.
        """
        if not {column, against} <= set(self.rounds):
            return np.empty(0), np.empty(0)
        x, y = self.rounds[against], self.rounds[column]
        initial = 0.0 if column.startswith("total/") else self.summarised("initial", column)
        if initial is not None:
            x, y = np.append(0.0, x), np.append(initial, y)
        keep = np.isfinite(x) & np.isfinite(y)
        return x[keep], y[keep]

    def total(self, count: str) -> float | None:
        """Sum of a count over all rounds; None if it was not recorded."""
        values = self.rounds.get(count, np.empty(0))
        return None if np.isnan(values).all() else float(np.nansum(values))

    def get(self, section: str, key: str) -> Any:
        """`config[section][key]`, the name where that is a thing with options, or None where either is missing."""
        here = mapping(self.config.get(section))
        value = here.get(key, here.get("own"))  # made in Python
        while isinstance(value, dict):
            value = value.get("own", value.get("name"))
        return value

    def section(self, key: str) -> dict[str, Any]:
        """A section of `summary.json`: "initial", "final", "best" or "selected", by `eval/<metric>`; empty if it is missing."""
        return mapping(self.summary.get(key))

    def summarised(self, key: str, column: str | None = None) -> float | None:
        """A finite number of `summary.json`, by key or by section and column, else None."""
        value = self.summary.get(key) if column is None else self.section(key).get(column)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def final(self, metric: str) -> float | None:
        """The summary's final value, else that of the last evaluation (a run that was killed has no summary)."""
        values = self.curve(f"eval/{metric}", "rounds_completed")[1]
        known = self.summarised("final", f"eval/{metric}")
        return known if known is not None else float(values[-1]) if len(values) else None

    @property
    def rounds_done(self) -> int:
        """How many rounds were completed."""
        known = self.summarised("rounds")
        return int(known) if known is not None else len(self.rounds.get("round", ()))

    @property
    def seed(self) -> Any:
        """The seed in the config, or None."""
        return self.config.get("seed")


def gini(counts: np.ndarray, size: int) -> float:
    """Gini coefficient of how often `size` clients were heard: 0 if all equally, towards 1 if few do all, nan if none.

    `counts` (n,) are the clients that were heard, n <= size; the others are zeros, which are never formed.
    """
    ordered = np.sort(np.asarray(counts, dtype=float))
    if size < 1 or ordered.sum() == 0:
        return math.nan
    rank = np.arange(size - len(ordered) + 1, size + 1)
    return max(0.0, float(((2 * rank - size - 1) * ordered).sum() / (size * ordered.sum())))  # equal rates give -1e-17


def completed_counts(run: Run) -> tuple[np.ndarray, int] | None:
    """In how many rounds each heard client was heard (n,), and the population's size. None without outcomes or clients."""
    result = heard_clients(run)
    return None if result is None else result[1:]


def heard_clients(run: Run) -> tuple[np.ndarray, np.ndarray, int] | None:
    """The clients that were heard (n,), in how many rounds (n,), and the population's size. None without outcomes or clients.

    A stale reply counts, for the algorithm used it; what a client sent in an aborted attempt does not; a client heard in two
    phases of a round counts once.
    """
    if not len(run.outcomes.get("client", ())):
        return None
    known = run.get("population", "clients")
    size = max(known if isinstance(known, int) else 0, len(np.unique(run.outcomes["client"])))
    if counted(run):
        heard = run.outcomes["rounds_heard"] > 0
        return run.outcomes["client"][heard], run.outcomes["rounds_heard"][heard].astype(np.int64), size
    if not {"round", "outcome"} <= set(run.outcomes):
        return None
    used = answered(run)
    rounds, when = np.unique(run.outcomes["round"][used], return_inverse=True)
    clients, who = np.unique(run.outcomes["client"][used], return_inverse=True)
    once = np.unique(who * len(rounds) + when)
    return clients, np.bincount(once // max(1, len(rounds)), minlength=len(clients)), size


def counted(run: Run) -> bool:
    """Whether the outcomes are a row a client, with counts, and not a row an invitation."""
    return "rounds_heard" in run.outcomes


def invitations(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The clients that were invited (n,), ascending, and how often (n,), in all phases."""
    if counted(run):
        return run.outcomes["client"], np.sum([run.outcomes[name] for name in OUTCOMES], axis=0).astype(np.int64)
    return np.unique(run.outcomes["client"], return_counts=True)


def answered(run: Run) -> np.ndarray:
    """Return which rows of the outcomes (n,) are answers that are used: heard or stale, in the last attempt at their round.

    In a round that was skipped, or that failed with its run, none was.
    """
    used = np.isin(run.outcomes["outcome"], ("completed", "stale")) & np.isin(run.outcomes["round"], _of_use(run))
    if "attempt" not in run.outcomes:
        return used
    rounds, row = np.unique(run.outcomes["round"], return_inverse=True)
    last = np.zeros(len(rounds))
    np.maximum.at(last, row, run.outcomes["attempt"])
    return used & (run.outcomes["attempt"] == last[row])


def _of_use(run: Run) -> np.ndarray:
    """Return the rounds that were done, and not skipped."""
    done, skipped = run.rounds.get("round", np.empty(0)), run.rounds.get("skipped")
    return done if skipped is None else done[skipped != 1]


def skipped(run: Run) -> int:
    """Return how many rounds were skipped, answered by too few."""
    known = run.summarised("skipped_rounds")
    return int(known if known is not None else run.total("skipped") or 0)


def domain_columns(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """The columns of `domains.parquet` that some run has, apart from those that say which row it is."""
    every = (column for runs in groups.values() for run in runs for column in run.domains)
    return [column for column in dict.fromkeys(every) if column not in ("round", "domain", "name", "examples")]


def domain_names(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """What the domains are called, where all runs call them alike; else nothing."""
    told = {tuple(map(str, run.summary.get("domains") or ())) for runs in groups.values() for run in runs}
    return list(told.pop()) if len(told) == 1 else []


def class_names(groups: Mapping[str, Sequence[Run]]) -> list[str]:
    """The names of the classes, where all runs have the same; else nothing."""
    told = {tuple(run.section("examples").get("class_names") or ()) for runs in groups.values() for run in runs}
    return [str(name) for name in told.pop()] if len(told) == 1 else []


def by_domain(run: Run, column: str) -> dict[float, np.ndarray] | None:
    """Round -> values (domains,) of a column of `domains.parquet`; None where there is no finite number."""
    return by_each(run.domains, "domain", column)


def by_each(table: Table, key: str, column: str) -> dict[float, np.ndarray] | None:
    """Round -> values (n,) of a column, in the order of the key; None where there is no finite number."""
    rounds, which, values = (table.get(name) for name in ("round", key, column))
    if rounds is None or which is None or values is None:
        return None
    if values.dtype != np.float64 or not np.isfinite(values).any():
        return None
    order = np.lexsort((which, rounds))
    at, first = np.unique(rounds[order], return_index=True)
    return dict(zip(at.tolist(), np.split(values[order], first[1:]), strict=True))


def told_in(runs: Iterable[Run]) -> Literal["floats", "bytes"]:
    """What traffic is told in: floats, but bytes where numbers are sent at other widths in some of the runs."""
    narrow = (
        any(mapping(run.config.get("transforms")).values()) or run.config.get("secure_aggregation") for run in runs
    )
    return "bytes" if any(narrow) else "floats"


def at_equal_traffic(groups: Sequence[Sequence[Run]], metric: str, unit: str) -> tuple[float, list[np.ndarray]] | None:
    """Every run's metric once the server had received as many floats, or bytes, as the run that received fewest, in all.

    Returns that number, and for each group the metric of its runs (runs,), interpolated between evaluations,
    nan where the run was not evaluated by then. Runs that sent nothing do not count. None if that leaves nothing.
    """
    totals = [run.total(f"{unit}_up") or 0 for runs in groups for run in runs]
    least = min((total for total in totals if total > 0), default=None)
    if least is None:
        return None
    where = np.array([least])
    curves = [[run.curve(f"eval/{metric}", f"total/{unit}_up") for run in runs] for runs in groups]
    result = [np.concatenate([at(x, y, where) for x, y in group]) for group in curves]
    return (least, result) if np.isfinite(np.concatenate(result)).any() else None


def outcome_shares(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray] | None:
    """The share of each outcome by round, mean over runs: rounds (n,) and shares (n, 5), columns as in `OUTCOMES`; or None.

    Counted in the outcomes table, which knows stale replies, or where that is missing taken from the counts of the rounds.
    """
    rounds, shares = [], []
    for run in runs:
        if {"round", "outcome"} <= set(run.outcomes) and len(run.outcomes["round"]):
            index, at_row = np.unique(run.outcomes["round"], return_inverse=True)
            counts = np.stack(
                [np.bincount(at_row, run.outcomes["outcome"] == outcome, len(index)) for outcome in OUTCOMES], axis=1
            )
        elif {"round", "completed"} <= set(run.rounds):
            index, none = run.rounds["round"], np.zeros(len(run.rounds["round"]))
            counts = np.nan_to_num(np.stack([run.rounds.get(outcome, none) for outcome in OUTCOMES], axis=1))
        else:
            continue
        asked = counts.sum(axis=1) > 0
        rounds.append(index[asked])
        shares.append(counts[asked] / counts[asked].sum(axis=1, keepdims=True))
    if not any(map(len, rounds)):
        return None
    index, at_row = np.unique(np.concatenate(rounds), return_inverse=True)
    columns = np.concatenate(shares).T
    return index, np.stack([np.bincount(at_row, column) / np.bincount(at_row) for column in columns], axis=1)


def read(path: Path, checked: Sequence[str] = (*KEPT, *TOLD), wanted: Collection[str] = OF_RUNS) -> Run:
    """The run folder `path`, of which any file but `rounds.parquet` may be missing that the summary has no digest of.

    Args:
        path: of the folder.
        checked: files that are to have the digests in the summary, if it has any; models may be missing.
        wanted: the tables that are read; others are empty.

    Raises:
        ConfigError: a file that is there cannot be read, or one that the summary has a digest of is missing or another; the
            line names it and the mend.
    """
    summary, files = read_summary(path)
    check_files(path, files, checked, may_lack=MODELS)
    config_text = _text(path / "config.yaml")
    try:
        config = mapping(parse(config_text))
    except ValueError as error:
        raise ConfigError(f"{path / 'config.yaml'}: not readable as YAML; mend or remove it ({error})") from None
    algorithm = config.get("algorithm")
    named = mapping(algorithm).get("name") or mapping(mapping(algorithm).get("own")).get("name")
    found: dict[str, Table] = {name: read_table(path / f"{name}.parquet") if name in wanted else {} for name in OF_RUNS}
    return Run(
        path=path,
        label=" ".join(str(summary.get("label") or named or path.name).split()),
        config=config,
        config_text=config_text,
        environment=_json(path / "environment.json"),
        summary=summary,
        rounds=_with_totals(found.pop("rounds")),
        **found,
    )


def _with_totals(rounds: Table) -> Table:
    """In order of rounds, the last of each, with `completed` and the cumulative sums that curves are drawn against."""
    if "round" not in rounds:
        return {}
    _, last = np.unique(rounds["round"][::-1], return_index=True)
    rounds = {name: values[::-1][last] for name, values in rounds.items() if values.dtype == np.float64}
    rounds["rounds_completed"] = rounds["round"] + 1
    for count in COUNTS:
        if count in rounds and not np.isnan(rounds[count]).all():
            rounds[f"total/{count}"] = np.nancumsum(rounds[count])
    return rounds


def read_table(path: Path) -> Table:
    """Return a table by its columns, floats or text; empty where there is no such file. Raises ConfigError if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        frame: Any = parquet.read(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; resume the run to rewrite it") from None
    return {str(name): _column(frame[name]) for name in frame.columns}


def _column(series: Any) -> np.ndarray:
    """Floats with nan, also for an all-null column, whatever its type in the file; everything else as text."""
    if pd.api.types.is_numeric_dtype(series):
        return series.to_numpy(dtype=float, na_value=np.nan)
    return np.full(len(series), np.nan) if series.isna().all() else series.astype(str).to_numpy(dtype=object)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json_of(path, {"packages": dict})
    except FileNotFoundError:
        return {}
    except ConfigError as error:
        raise ConfigError(f"{error}; mend or remove it") from None


def _text(path: Path) -> str:
    try:
        return text_of(path, YAML_BYTES)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read; mend or remove it ({one_line(error)})") from None


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
