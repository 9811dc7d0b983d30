"""A table of a paper, run again: every row on every seed, ours beside the paper's."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from fedfleet.commands import study as studying
from fedfleet.config import schema as C
from fedfleet.config.checking import unknown
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.progress import Progress
from fedfleet.experiments.runfolder import ENVIRONMENT
from fedfleet.experiments.sweep import Trial
from fedfleet.files import parquet
from fedfleet.files.documents import YAML_BYTES, json_of, parse, text_of
from fedfleet.files.summary import ended as checked
from fedfleet.files.writing import write_text
from fedfleet.report import paper_figure
from fedfleet.report.groups import versions
from fedfleet.simulator.driver.evaluation import less_is_better
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.plain_text import OtherEncoding
from fedfleet.simulator.registry import Options

WORST, MEAN = "worst", "mean"
Found = dict[str, dict[str, list[float]]]
"""Row -> column -> a value a seed."""
Places = dict[str, tuple[str, str | None]]
"""Label -> its row, and its column where it fills one alone."""
Printed = dict[str, float | tuple[float, float]]


class Across(Options):
    """Columns of which each is a run of its own: what varies from one to the next."""

    key: str
    """Dotted key, such as domains.target."""
    columns: dict[str, Any] = Field(min_length=1)
    """Column -> value of the key."""
    metric: str
    """Final metric of all columns."""


class Block(Options):
    """Printed numbers of one setting."""

    where: dict[str, Any] = Field(min_length=1)
    """Dotted key -> value that a configuration of this setting has there."""
    source: str
    """The table, and the part of it."""
    paper: dict[str, Printed]
    """Row -> column -> what is printed there."""

    def is_of(self, config: C.Config) -> bool:
        """Return whether a configuration is of this setting."""
        try:
            return all(C.at(config, key) == value for key, value in self.where.items())
        except AttributeError:  # such as the alpha of a partition that has none
            return False


class PaperTable(Options):
    """What a paper's table says, and the configuration that computes it."""

    title: str
    rows: str = "trained on"
    """What the rows are."""
    source: str
    """The paper, and which of its tables."""
    config: Path
    """Configuration whose ``compare`` has the rows; beside this file."""
    columns: dict[str, str] = Field(default={})
    """Column -> final metric, such as accuracy, or accuracy[0] for that of domain 0."""
    across: Across | None = None
    """Instead of ``columns``, columns that are runs of their own."""
    labels: str | None = None
    """A regular expression of whole labels, with groups ``row`` and ``column``, for rows and columns that are parts of a label. A
    label fills one cell, several of the same cell are averaged, and those that do not match are not run."""

    @field_validator("columns")
    @classmethod
    def _readable(cls, columns: dict[str, str]) -> dict[str, str]:
        if wrong := [m for m in columns.values() if not re.fullmatch(r"\w+(\[\d+\])?", m)]:
            raise ValueError(f"{wrong[0]!r}: write a metric, or metric[k] for that of domain k")
        return columns

    @field_validator("labels")
    @classmethod
    def _groups(cls, labels: str | None) -> str | None:
        try:
            groups = {"row", "column"} if labels is None else set(re.compile(labels).groupindex)
        except re.error as e:
            raise ValueError(
                f"{labels!r}: no regular expression ({e}): write one such as (?P<row>.+) to (?P<column>.+)"
            ) from None
        if groups != {"row", "column"}:
            raise ValueError(f"{labels!r}: it needs the groups row and column: (?P<row>.+) to (?P<column>.+)")
        return labels

    worst_of: list[str] = Field(default=[])
    """Columns of which the worst is a column too; all of them losses, or all of them merits."""
    mean_of: list[str] = Field(default=[])
    """Columns of which the mean is a column too."""
    value: Literal["final", "best", "selected"] = "final"
    """Which value of a metric: that of the last model, the best over the run, or that of the model that ``checkpoint.best`` selects
    by another metric."""
    scale: float = 1.0
    """What a metric is multiplied by."""
    digits: int = 2
    baseline: str | dict[str, str] | None = None
    """Row that the others are compared with, seed by seed; or row -> the one that it is compared with."""
    paper: dict[str, Printed] = Field(default={})
    """Row -> column -> what is printed there: a number, or a mean and a standard deviation; "worst" and "mean" are columns."""

    blocks: list[Block] = Field(default=[])
    """Instead of ``paper``, what is printed of several settings. That of the configuration's own is shown, and else none."""

    printed: str = "paper"
    """The name of rows of printed numbers, such as where they are no paper's."""
    cited: dict[str, Printed] = Field(default={})
    """Rows of the paper's that are not run here, such as those it takes from other papers: row -> column -> what is printed."""

    def compared(self, rows: Iterable[str]) -> dict[str, str]:
        """Return row -> the row that it is compared with."""
        if isinstance(self.baseline, str):
            return {row: self.baseline for row in rows if row != self.baseline}
        return self.baseline or {}

    def told(self) -> list[dict[str, Printed]]:
        """Return the rows that are printed, of each setting."""
        return [self.paper, *(block.paper for block in self.blocks)]

    def at(self, config: C.Config) -> PaperTable:
        """Return the table with what is printed of the setting that a configuration has, if that is any."""
        if not self.blocks:
            return self
        mine = next((block for block in self.blocks if block.is_of(config)), None)
        source, paper = ("nothing of this setting", {}) if mine is None else (mine.source, mine.paper)
        return self.model_copy(update={"source": f"{self.source}, {source}", "paper": paper, "blocks": []})

    @model_validator(mode="after")
    def _columns(self) -> PaperTable:
        if bool(self.columns) == (self.across is not None):
            raise ValueError("columns: give columns, or across")
        if self.labels is not None and self.across is not None:
            raise ValueError("labels: not with across, whose rows are whole labels: leave one out")
        if self.paper and self.blocks:
            raise ValueError("blocks: they are instead of paper: leave one out")
        if self.across is not None:
            metric = self._readable({"across": self.across.metric})["across"]
            object.__setattr__(self, "columns", dict.fromkeys(self.across.columns, metric))
        return self

    def places(self, labels: Iterable[str]) -> Places:
        """Return the place of each label that is run. Raises ValueError."""
        if self.labels is None:
            return {label: (label, None) for label in labels}
        found = {label: place for label in labels if (place := re.fullmatch(self.labels, label))}
        result = {label: (place["row"], place["column"]) for label, place in found.items()}
        if strange := [label for label, (_, column) in result.items() if column not in self.columns]:
            raise ValueError(
                f"{strange[0]!r} is of the column {result[strange[0]][1]!r}: choose of {', '.join(self.columns)}"
            )
        if empty := self.columns.keys() - {column for _, column in result.values()}:
            raise ValueError(
                f"no label is of the column {min(empty)!r}: leave it out of columns, or write another labels"
            )
        return result

    def of(self, trial: Trial, column: str | None) -> dict[str, str]:
        """Return the columns that a run fills, with their metrics; ``column`` is that of its label."""
        if column is not None:
            return {column: self.columns[column]}
        if self.across is None:
            return self.columns
        mine = trial.point[self.across.key]
        return {c: self.across.metric for c, value in self.across.columns.items() if value == mine}


def read(path: Path) -> PaperTable:
    """Read a table. Raises ConfigError."""
    try:
        result = PaperTable.model_validate_json(json.dumps(parse(text_of(path, YAML_BYTES))), strict=True)
    except OtherEncoding as e:
        raise ConfigError(f"{path}: {e}") from None
    except ValidationError as e:
        first = e.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, TypeError, ValueError) as e:
        raise ConfigError(f"{path}: cannot be read ({one_line(e)}): give the YAML file of a table") from None
    printed = {*result.columns, WORST, MEAN}
    of_blocks = [(f"blocks.{i}.paper", block.paper) for i, block in enumerate(result.blocks)]
    for key, rows in (("paper", result.paper), *of_blocks, ("cited", result.cited)):
        if strange := [f"{row}.{c}" for row, values in rows.items() for c in values if c not in printed]:
            raise ConfigError(f"{path}: {key}.{strange[0]}: no such column: choose of {', '.join(result.columns)}")
    if twice := [row for row in result.cited if any(row in rows for rows in result.told())]:
        raise ConfigError(f"{path}: cited.{twice[0]}: it is a row of paper too: leave it out of one")
    for key, columns in (("worst_of", result.worst_of), ("mean_of", result.mean_of)):
        if unknown := [c for c in columns if c not in result.columns]:
            raise ConfigError(f"{path}: {key}: {unknown[0]!r} is none of the columns {', '.join(result.columns)}")
    return result


def run(
    path: Path, overrides: list[str] | None, seeds: int | None, out: Path, progress: Progress, jobs: int | None = None
) -> str:
    """Run what is not yet finished, ``jobs`` at a time; write the table and its figure, and return it in Markdown.

    Raises ConfigError and FedfleetError.
    """
    table = read(path)
    config = C.load(path.parent / table.config, overrides)
    if table.across is not None:
        config = C.with_overrides(config, {"vary": {table.across.key: [*table.across.columns.values()]}})
    config, places = arranged(config, table, path)
    rows = list(dict.fromkeys(row for row, _ in places.values()))
    compared, told = table.compared(rows), [row for of in table.told() for row in of]
    for key, named in (("baseline", [*compared, *compared.values()]), ("paper", told)):
        if unknown := [row for row in named if row not in rows]:
            raise ConfigError(f"{path}: {key}: {unknown[0]!r} is no label of compare in {table.config}")
    table = table.at(config)
    prepared = studying.prepare(
        studying.plan(config, seeds=seeds, grid=False), progress, lambda row: _check(row, table, path)
    )
    errors = studying.run_trials(prepared, out, progress, jobs)
    result = collected(prepared, table, places, out)
    text = markdown(table, result) + _versions(prepared, out)
    write_text(out / "table.md", text)
    write_text(out / "table.json", json.dumps(result, indent=2).replace("NaN", "null") + "\n")
    printed = {row: {c: _first(v) for c, v in columns.items()} for row, columns in table.paper.items()}
    (out / "table.png").write_bytes(paper_figure.draw(table.title, result, printed))
    if errors:
        progress.say(text)
    studying.check(errors, prepared.study)
    return text


def arranged(config: C.Config, table: PaperTable, path: Path) -> tuple[C.Config, Places]:
    """Return the configuration with the labels alone that are run, and the place of each. Raises ConfigError."""
    labels = config.compare or {}
    try:
        places = table.places(labels)
    except ValueError as e:
        raise ConfigError(f"{path}: labels: {e}") from None
    if table.labels is None:
        return config, places
    return config.model_copy(update={"compare": {label: labels[label] for label in places}}), places


def _check(row: Experiment, table: PaperTable, path: Path) -> None:
    """Refuse columns that a row would not have. Raises ConfigError."""
    known = row.final_names() if table.value == "final" else row.metric_names()
    if table.value == "selected" and row.config.checkpoint.best in (None, "auto"):
        raise ConfigError(
            f"{path}: value='selected': {table.config} does not say by what models are selected: set checkpoint.best there"
        )
    for column, metric in table.columns.items():
        if f"eval/{metric.partition('[')[0]}" not in known:
            raise ConfigError(
                f"{path}: columns.{column}: {unknown('metric', metric, [k.removeprefix('eval/') for k in known])}"
            )
        if "[" in metric and "domain" not in row.evaluation["test"]:
            raise ConfigError(
                f"{path}: columns.{column}: the test examples of {table.config} have no domains: write a metric alone"
            )
        if "[" in metric and table.value != "final":
            raise ConfigError(
                f"{path}: value={table.value!r}: {metric!r} is known of the last model alone: write a metric of all domains"
            )


def collected(prepared: studying.Prepared, table: PaperTable, places: Places, out: Path) -> Found:
    """Return of each row the columns, and the worst of some, over the seeds in their order.

    Values are scaled, NaN where a run has none, and a cell that no run fills has none.
    """
    cells: dict[str, dict[str, dict[int, list[float]]]] = {}
    for trial in prepared.study.trials:
        folder = studying.folder(out, trial)
        summary = checked(folder)
        ended, final = summary.get("status") in ("finished", "stopped"), summary.get(table.value, {})
        row, column = places[trial.label]
        mine = cells.setdefault(row, {name: {} for name in table.columns})
        for name, metric in table.of(trial, column).items():
            value = table.scale * _value(folder, final, metric) if ended else math.nan
            mine[name].setdefault(trial.config.seed, []).append(value)
    result = {
        row: {c: [statistics.fmean(v) for v in of.values()] for c, of in mine.items()} for row, mine in cells.items()
    }
    for mine in result.values():
        for name, of, together in ((WORST, table.worst_of, _worst(table)), (MEAN, table.mean_of, statistics.fmean)):
            if of:
                whole = all(mine[column] for column in of)
                mine[name] = [together(seed) for seed in zip(*(mine[c] for c in of), strict=True)] if whole else []
    return result


def _less_is_better(table: PaperTable, column: str) -> bool:
    column = {WORST: table.worst_of, MEAN: table.mean_of}.get(column, [column])[0]
    return less_is_better(table.columns[column])


def _worst(table: PaperTable) -> Callable[[Iterable[float]], float]:
    return max if table.worst_of and _less_is_better(table, WORST) else min


def _value(run: Path, final: Mapping[str, float], metric: str) -> float:
    name, _, domain = metric.removesuffix("]").partition("[")
    if not domain:
        if f"eval/{name}" not in final:
            raise ConfigError(f"columns: {metric!r} is not measured: choose one of {', '.join(final)}")
        value = final[f"eval/{name}"]
        return math.nan if value is None else value
    each = parquet.read(run / "domains.parquet")
    if name not in each.columns or int(domain) not in set(each["domain"]):
        raise ConfigError(f"columns: {metric!r} is not measured: choose one of {', '.join(each)}")
    known = each.loc[each["domain"] == int(domain), name].to_numpy()
    return float(known[-1])


def markdown(table: PaperTable, result: Found) -> str:
    """Return the table in Markdown, ours and below it the paper's, and the differences from the baseline."""
    return "\n".join([*_ours(table, result), *_differences(table, result)]) + "\n"


def _versions(prepared: studying.Prepared, out: Path) -> str:
    """Say where the runs had several versions of packages."""
    files = [studying.folder(out, trial) / ENVIRONMENT for trial in prepared.study.trials]
    mixed = versions([json_of(file) for file in files if file.exists()])
    return f"\nSeveral versions of packages, which may change numbers: {'; '.join(mixed)}.\n" if mixed else ""


def _ours(table: PaperTable, result: Found) -> Iterator[str]:
    first = next(iter(result.values()))
    seeds = max(map(len, first.values()))
    heads = [*first, "worst of the means"] if table.worst_of else list(first)
    yield f"{table.title} ({table.source}); ours: mean ± standard deviation over {seeds} seeds\n"
    yield f"| {table.rows} | | {' | '.join(heads)} |"
    yield f"|---|---|{'---|' * len(heads)}"
    for label, mine in result.items():
        cells = [_mean(values, table.digits) for values in mine.values()]
        if table.worst_of:
            means = [statistics.fmean(mine[c]) for c in table.worst_of if mine[c]]
            cells.append(f"{_worst(table)(means):.{table.digits}f}" if means else "")
        yield f"| {label} | ours | {' | '.join(cells)} |"
        if label in table.paper:  # whose worst is the worst of the means
            names = [*("" if c == WORST else c for c in mine), *([WORST] if table.worst_of else [])]
            yield f"| | {table.printed} | {' | '.join(_printed(table.paper[label].get(c), table.digits) for c in names)} |"
    for label, printed in table.cited.items():
        cells = [_printed(printed.get(c), table.digits) for c in heads]
        yield f"| {label} | {table.printed} | {' | '.join(cells)} |"


def _differences(table: PaperTable, result: Found) -> Iterator[str]:
    compared, one = table.compared(result), isinstance(table.baseline, str)
    if not compared:
        return
    columns = next(iter(result.values()))
    yield f"\nDifferences{f' from {table.baseline}' if one else ''}, seed by seed: mean ± standard error (seeds that are better)\n"
    yield f"| {table.rows} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for label, base in compared.items():
        both = {c: (result[label][c], result[base][c]) for c in columns}
        gaps = {c: [a - b for a, b in zip(*two, strict=True)] if all(two) else [] for c, two in both.items()}
        cells = (_gap(each, table.digits, _less_is_better(table, c)) for c, each in gaps.items())
        yield f"| {label if one else f'{label} beside {base}'} | {' | '.join(cells)} |"


def _gap(gaps: list[float], digits: int, less: bool) -> str:
    gaps = [g for g in gaps if math.isfinite(g)]
    if not gaps:
        return "none"
    better = sum(g < 0 if less else g > 0 for g in gaps)
    error = f" ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.{digits}f}" if len(gaps) > 1 else ""
    return f"{statistics.fmean(gaps):+.{digits}f}{error} ({better} of {len(gaps)})"


def _mean(values: list[float], digits: int) -> str:
    if not values:  # a cell that no run fills
        return ""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return "none"
    spread = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    of = f" ({len(known)} of {len(values)} runs)" if len(known) < len(values) else ""
    return f"{statistics.fmean(known):.{digits}f}{spread}{of}"


def _first(value: float | tuple[float, float]) -> float:
    """Return the mean of what is printed."""
    return value[0] if isinstance(value, tuple) else value


def _printed(value: Any, digits: int) -> str:
    match value:
        case None:
            return ""
        case (mean, deviation):
            return f"{mean:.{digits}f} ± {deviation:.{digits}f}"
    return f"{value:.{digits}f}"
