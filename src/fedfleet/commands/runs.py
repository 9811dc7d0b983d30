"""Runs found again: a row a run of its settings and final metrics, or the rows of a table of all, by an expression in SQL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from fedfleet.config.checking import unknown
from fedfleet.files import parquet
from fedfleet.files.documents import YAML_BYTES, leaves, parse, text_of
from fedfleet.files.summary import SUMMARY, TABLES, summary_of
from fedfleet.report.shown import parted
from fedfleet.report.traps import worst_class_of
from fedfleet.report.values import NAMES
from fedfleet.report.words import joined, plain_value
from fedfleet.simulator.errors import ConfigError, one_line

CONFIG, ROUNDS = "config.yaml", "rounds.parquet"
INSIDE = ("checkpoints", "figures", "paper")
"""Folders of a run in which no other run is looked for."""
FIRST = ("folder", "label", "seed", "status")
NAMED = 5  # values of a column, where no row was found
METRICS = 2  # final metrics that a terminal shows unless asked for others
OF_RUN = "run."
"""Prefix of a run's column where a table of runs has one of that name."""
FOUND, FILES, PLACE = "found", "files", "place_of_run"
"""What the rows of runs, and of one of their tables, are called in queries; and the column by which these keep their order."""
STRING = r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\""


def folders(path: Path) -> Iterator[Path]:
    """Yield the run folders at and below a folder, in order; links are not followed."""
    for at, below, files in os.walk(path):
        below[:] = sorted(name for name in below if name not in INSIDE)
        if CONFIG in files and (SUMMARY in files or ROUNDS in files):
            below.clear()
            yield Path(at)


def rows(path: Path) -> pd.DataFrame:
    """Return a row a run below a folder: where it is, how it ended, its settings by dotted key, its metrics.

    A section that names a part has the name under its own key, too: ``algorithm`` and ``algorithm.name``. Final metrics are
    ``eval/<metric>``, others ``best/``, ``initial/`` and ``selected/<metric>``; of a classifier there are ``worst_recall`` and
    ``worst_class``. Raises ConfigError where there is no run.
    """
    found = [_row(folder, path) for folder in folders(path)]
    if not found:
        raise ConfigError(f"{path}: no run there or below: give a folder of runs, such as runs")
    frame = pd.DataFrame(found)
    return pd.DataFrame({str(name): _typed(frame[name]) for name in frame})


def _row(folder: Path, path: Path) -> dict[str, Any]:
    summary, config = summary_of(folder), _config(folder / CONFIG)
    flat = dict(leaves(config)) if config else {}
    flat |= dict(_named(config))
    row: dict[str, Any] = {"folder": str(folder.relative_to(path)), "path": str(folder.absolute())}
    row |= {**flat, "label": summary.get("label") or config.get("label") or flat.get("algorithm")}
    row |= {key: summary.get(key) for key in ("status", "rounds", "seconds", "error", "model_floats", "virtual_s")}
    row |= {key: summary.get(key) for key in ("bytes_up", "bytes_down", "floats_up", "floats_down")}
    for section, prefix in (("final", "eval/"), ("best", "best/"), ("initial", "initial/"), ("selected", "selected/")):
        told = summary.get(section) or {}
        row |= {f"{prefix}{str(name).removeprefix('eval/')}": value for name, value in told.items()}
    with suppress(ConfigError):  # a damaged table hides no run
        if (worst := worst_class_of(folder)) is not None:
            row["worst_class"], row["worst_recall"] = worst
    return row


def _named(node: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of sections that name a part, and the name."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            of = value.get("own", value)
            name = next((of[k] for k in NAMES if isinstance(of.get(k), str)), None) if isinstance(of, Mapping) else None
            if name is not None:
                yield f"{at}{key}", name
            yield from _named(value, f"{at}{key}.")


def _config(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        read = parse(text_of(path, YAML_BYTES))
        return read if isinstance(read, dict) else {}
    return {}


def _typed(column: Any) -> Any:
    """Return a column of one type: truth values, whole numbers, numbers, or text; null where there is nothing."""
    known = [value for value in column if not _nothing(value)]
    whole = lambda value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
    if known and all(isinstance(value, bool) for value in known):
        kind = "boolean"
    elif known and all(whole(value) or (isinstance(value, float) and value.is_integer()) for value in known):
        kind = "Int64" if max(map(abs, known)) < 2**63 else "Float64"
    elif known and all(whole(value) or isinstance(value, float) for value in known):
        kind = "Float64"
    else:
        return pd.Series([None if _nothing(value) else str(value) for value in column], dtype="string")
    return pd.Series([None if _nothing(value) else value for value in column], dtype=kind)


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows as plain values, None where there is nothing."""
    return [
        {str(k): None if pd.isna(v) else v for k, v in row.items()} for row in frame.astype(object).to_dict("records")
    ]


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def select(frame: pd.DataFrame, where: str | None = None, table: str | None = None) -> pd.DataFrame:
    """Return the rows of runs for which an expression holds; or those of a table of the runs, with what tells the runs apart.

    Args:
        frame: as ``rows`` returns it.
        where: in SQL, with columns by their names, such as ``algorithm = 'fedavg' and availability.rate < 0.5``.
        table: "rounds", "outcomes", …: its rows in the place of the runs'. A setting with the name of one of its columns is
            ``run.<name>``.

    Raises ConfigError for an expression that cannot be read, and where no run has the table.

    """
    if where is None and table is None:
        return frame
    try:
        import duckdb
    except ImportError:
        option = "--where" if where is not None else "--table"
        raise ConfigError(f"{option}: it needs DuckDB: pip install 'fedfleet[query]'") from None
    files = [] if table is None else _files(frame, table)
    with duckdb.connect(config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}) as base:
        base.execute(f"set allowed_paths = [{', '.join(map(_text, files))}]")
        base.execute("set enable_external_access = false")  # an expression reads these files alone
        known, order, aside = list(map(str, frame)), PLACE, [PLACE]
        told, source = frame, FOUND
        if files:
            of = f"read_parquet([{', '.join(map(_text, files))}], union_by_name = true, filename = true, file_row_number = true)"
            base.execute(f"create view {FILES} as select * from {of}")
            columns = [str(row[0]) for row in base.execute(f"describe {FILES}").fetchall()]
            own = [name for name in columns if name not in ("filename", "file_row_number")]
            told = frame.rename(columns={name: f"{OF_RUN}{name}" for name in own if name in frame})
            told = told.assign(filename=[str(Path(path) / f"{table}.parquet") for path in frame["path"]])
            source, order = f"{FOUND} join {FILES} using (filename)", f"{PLACE}, file_row_number"
            known, aside = [*map(str, told), *own], [PLACE, "filename", "file_row_number"]
        base.register(FOUND, told.assign(**{PLACE: range(len(told))}))
        condition = "" if where is None else f"where ({quoted(where, known)})"
        query = f"select * exclude ({', '.join(aside)}) from {source} {condition} order by {order}"
        try:
            return base.execute(query).df()
        except duckdb.Error as e:
            raise ConfigError(_said(str(where), str(e), known)) from None


def _files(frame: pd.DataFrame, table: str) -> list[str]:
    if f"{table}.parquet" not in TABLES:
        raise ConfigError(unknown("--table", table, [name.removesuffix(".parquet") for name in TABLES]))
    there = [path for folder in frame["path"] if (path := Path(folder) / f"{table}.parquet").is_file()]
    for path in there:
        with parquet.readable(path):  # which says what is damaged
            pass
    if not there:
        raise ConfigError(f"--table={table!r}: none of these runs has it: docs/reference/run_folder.md says which have")
    return [str(path) for path in there]


def _text(path: str) -> str:
    return "'" + path.replace("'", "''") + "'"


def quoted(where: str, names: Sequence[str]) -> str:
    """Return an expression whose columns are quoted, so that dots and slashes in their names are none of SQL's."""
    by_length = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"({STRING})|(?<![\w.])({by_length})(?!\w|\.\w)")
    return pattern.sub(lambda found: found[1] or '"' + found[2].replace('"', '""') + '"', where)


def _said(where: str, error: str, names: Sequence[str]) -> str:
    """Return what is wrong with an expression in a line, with the column that was meant if one is not known."""
    lost = re.search(
        r'Referenced (?:column|table) "(.*?)" not found|Cannot extract field .* from expression "(.*?)"', error
    )
    if lost:
        name = lost[1] or lost[2]
        if f'"{name}"' in where:
            return f"--where={where!r}: double quotes are of columns, and {name} is none: write text as '{name}'"
        if re.search(rf"[=<>]\s*{re.escape(name)}(?![\w.(])", where):
            return f"--where={where!r}: {name} is no column: if it is text, quote it: '{name}'"
        meant = re.search(rf"(?<![\w./]){re.escape(name)}[./][\w./]*", where)
        return unknown("--where", meant[0] if meant else name, list(dict.fromkeys(names)))
    first = one_line(error.split("\n")[0])
    return f"--where={where!r}: no expression in SQL ({first}): write such as \"algorithm = 'fedavg' and seed < 3\""


def why_none(where: str | None, every: pd.DataFrame, table: str | None) -> str | None:
    """Return what may find rows where an expression finds none; else None.

    Trials of a study, where it names a label that only begins theirs; else what there is in the columns that it names.
    """
    if where is None:
        return None
    if (of := _of_trials(where, every)) is not None:
        return of
    rows: Any = select(every, None, table)
    told = [f"{name} is {_values(rows[name].dropna())}" for name in named(where, list(map(str, rows)))]
    return f"--where={where!r}: of all rows, {joined(told)}" if told else None


def _values(column: Any) -> str:
    """Return what values there are."""
    if column.empty:
        return "nowhere told"
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        return " to ".join(dict.fromkeys(map(plain_value, (column.min(), column.max()))))
    found = sorted(map(plain_value, column.unique()))
    more = [f"{len(found) - NAMED} more"] if len(found) > NAMED else []
    return joined([*found[:NAMED], *more])


def _of_trials(where: str, every: pd.DataFrame) -> str | None:
    """Return what finds the trials of a study where an expression names a label that only begins theirs; else None."""
    for told in re.findall(r"(?<![\w.])(?:run\.)?label\s*=\s*'((?:[^']|'')*)'", where):
        label, labels = told.replace("''", "'"), every["label"].dropna()
        if not (labels == label).any() and labels.str.startswith(f"{label} ").any():
            return f"label = '{told}' is no run: trials of a study have their values in it, too: write label like '{told} %'"
    return None


def ordered(frame: pd.DataFrame, sort: str | None, *, descending: bool) -> pd.DataFrame:
    """Return rows by a column, those without a value last. Raises ConfigError for a column that is none."""
    if sort is None:
        return frame
    if sort not in frame:
        raise ConfigError(unknown("--sort", sort, [str(name) for name in frame]))
    return frame.sort_values(sort, ascending=not descending, kind="stable", na_position="last", ignore_index=True)


def shown(
    frame: Any,
    every: pd.DataFrame,
    asked: Sequence[str],
    where: str | None,
    sort: str | None,
    table: str | None,
) -> list[str]:
    """Return the columns for a terminal: those asked for; else what tells runs apart, the query names, and was measured.

    Args:
        frame: the rows.
        every: those of all runs.
        asked: columns asked for.
        where, sort, table: the query.

    Raises ConfigError for a column that is none.

    """
    names = [str(name) for name in frame]
    for name in asked:
        if name not in names:
            raise ConfigError(unknown("--columns", name, names))
    if asked:
        return list(asked)
    query = [*named(where or "", names), *([] if sort is None else [sort])]
    measured = [name for name in names if name.startswith("eval/") and frame[name].notna().any()]
    if table is not None:
        of_runs = {name for name in names if name in every and f"{OF_RUN}{name}" not in names}
        own = [name for name in names if name not in of_runs and not name.startswith((OF_RUN, "eval/"))] + measured
        first = [f"{OF_RUN}{name}" if f"{OF_RUN}{name}" in names else name for name in ("folder", "label", "seed")]
        return list(dict.fromkeys([*first, *query, *own]))
    metrics = [f"eval/{name}" for name in parted([name.removeprefix("eval/") for name in measured], ())[0]]
    return list(dict.fromkeys([*(name for name in FIRST if name in names), *query, *metrics[:METRICS]]))


def named(expression: str, names: Sequence[str]) -> list[str]:
    """Return the columns that an expression names, in their order there."""
    told = re.findall(r'"((?:[^"]|"")*)"', re.sub(r"'(?:[^']|'')*'", "", quoted(expression, names)))
    return [name for name in dict.fromkeys(told) if name in names]
