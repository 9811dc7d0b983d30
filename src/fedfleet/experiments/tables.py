"""The tables of a run: rounds, phases, outcomes, and metrics of each client and of each domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from fedfleet.experiments.participation import Participation
from fedfleet.experiments.parts import Parts
from fedfleet.files import parquet
from fedfleet.simulator.driver.records import PhaseRecord
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.fleet.responses import Outcome

COUNTS = (
    *("invited", "completed", "late", "failed", "unavailable", "stale", "merged_stale", "client_steps"),
    *("floats_up", "floats_down", "bytes_up", "bytes_down"),
)
INT, FLOAT, TEXT = pa.int64(), pa.float64(), pa.large_string()
WHOLE = dict.fromkeys(COUNTS, INT)
PLACE = {"round": INT, "phase": TEXT, "attempt": INT}
PHASES = PLACE | WHOLE | {"virtual_s": FLOAT, "train_loss": FLOAT}
OUTCOMES = pa.schema(PLACE | {"client": INT, "outcome": TEXT, "virtual_s": FLOAT})
EACH = {"clients": "client", "domains": "domain", "recall": "label"}
"""Tables of a row each of something, and the column that says of which."""
NAMES = pa.array([f.name.lower() for f in sorted(Outcome)], TEXT)


class Tables:
    """Rows in memory, but for outcomes, clients, domains and classes, which are many; ``flush`` writes all of them.

    ``metrics`` are the columns ``eval/<metric>``; set them before the first round. Outcomes that are ``counted`` are a row a
    client.
    """

    def __init__(self, folder: Path, *, counted: bool = False):
        self.folder = folder
        self.metrics: tuple[str, ...] = ()
        self._rounds: list[dict[str, Any]] = []
        self._evaluated: list[int] = []
        self._phases: list[dict[str, Any]] = []
        self._outcomes = None if counted else Parts(folder / "outcomes.parquet", OUTCOMES)
        self._counted = Participation() if counted else None
        self._void: Sequence[PhaseRecord] = ()
        self._each: dict[str, Parts] = {}
        self._counts: Counter[str] = Counter()
        self._newest: dict[str, tuple[int, int]] = {}
        self._pool = ThreadPoolExecutor(1, "tables")
        self._writing: Future[None] | None = None

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self._rounds)

    def add(self, record: RoundRecord, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Add a round and its evaluation; return its row of ``rounds.parquet``."""
        phases = self._enter(record.index, record.phases)
        if self._counted is not None:
            self._counted.add(record.phases, in_vain=bool(record.skipped))
        else:
            self._counts["outcomes"] += sum(len(p.clients) for p in record.phases)
        losses = [p["train_loss"] for p in phases if p["train_loss"] is not None]
        row = {"round": record.index, "seconds": record.seconds}
        row |= {k: sum(p[k] for p in phases) for k in COUNTS}
        row |= {"virtual_s": record.virtual_s - record.started_s, "train_loss": losses[-1] if losses else None}
        row |= {} if record.skipped is None else {"skipped": record.skipped}
        row |= {f"algorithm/{k}": v for k, v in record.metrics.items()} | {k: metrics.get(k) for k in self.metrics}
        self._rounds.append(row)
        if metrics:
            self._evaluated.append(len(self) - 1)
        if self._outcomes is not None and self._outcomes.full:
            self._take(self._outcomes)
        return row

    def add_phases(self, index: int, phases: list[PhaseRecord]) -> None:
        """Add the phases of a round that came to nothing."""
        self._enter(index, phases)
        self._void = phases

    def _enter(self, index: int, phases: list[PhaseRecord]) -> list[dict[str, Any]]:
        rows = []
        for p in phases:
            place = {"round": index, "phase": p.phase, "attempt": p.attempt}
            counts = {k: p.counts[k] for k in COUNTS}
            rows.append(place | counts | {"virtual_s": p.responses.duration_s, "train_loss": p.train_loss})
            if self._outcomes is None:
                continue
            columns = [pa.repeat(pa.scalar(value, PLACE[name]), len(p.clients)) for name, value in place.items()]
            ended = p.started_s + p.responses.seconds.numpy()
            columns += [p.clients.numpy(), NAMES.take(pa.array(p.responses.outcome.numpy())), ended]
            self._outcomes.add(pa.table(columns, schema=OUTCOMES))
        self._phases += rows
        return rows

    def add_each(self, name: str, index: int, values: Mapping[str, torch.Tensor], called: Sequence[str] = ()) -> None:
        """Add values (n,) after round ``index``, an entry a client, a domain or a class, to a table of ``EACH``.

        ``called`` are their names, where they have any.
        """
        size = max(map(len, values.values()))
        columns: dict[str, Any] = {"round": pa.repeat(pa.scalar(index, INT), size), EACH[name]: np.arange(size)}
        columns |= {"name": pa.array(named(range(size), called), TEXT)} if called else {}
        columns |= {k: _lengthened(v.numpy(), size) for k, v in values.items()}
        rows = pa.table(columns)
        if name not in self._each:
            self._each[name] = Parts(self.folder / f"{name}.parquet", rows.schema)
        self._each[name].add(rows)
        self._counts[name] += size
        self._newest[name] = index, size
        if self._each[name].full:
            self._take(self._each[name])

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Enter the evaluation of the last round."""
        self._rounds[-1] |= {k: metrics.get(k) for k in self.metrics}
        self._evaluated.append(len(self) - 1)

    def _whole(self) -> dict[str, pa.Table]:
        """Return the tables that are kept in memory, so far."""
        extra = sorted({k for row in self._rounds for k in row if k.startswith("algorithm/")})
        floats = ("virtual_s", "train_loss", *extra, *self.metrics)
        said = {"skipped": pa.bool_()} if any("skipped" in row for row in self._rounds) else {}
        types = {"round": INT, "seconds": FLOAT} | WHOLE | said | dict.fromkeys(floats, FLOAT)
        return {"rounds": _table(self._rounds, types), "phases": _table(self._phases, PHASES)}

    def flush(self, *, beside: bool = False) -> None:
        """Write what is not yet written; ``beside`` what goes on, and what goes wrong then is raised the next time."""
        held, grown = self._whole(), self._grown()
        held |= {} if self._counted is None else {"outcomes": self._counted.table(self._void)}
        for table in grown:
            table.take()

        def write() -> None:
            for name, table in held.items():
                parquet.write(table, self.folder / f"{name}.parquet")
            for table in grown:
                table.write()

        self._settle()
        if beside:
            self._writing = self._pool.submit(write)
        else:
            write()

    def _take(self, table: Parts) -> None:
        """Write the rows of a table that wait, beside what goes on."""
        table.take()
        self._settle()
        self._writing = self._pool.submit(table.write)

    def _settle(self) -> None:
        """Wait for what is being written. Raises what went wrong there."""
        if self._writing is not None:
            wait([self._writing])  # an interruption here leaves it to be waited for again
            done, self._writing = self._writing, None
            done.result()

    def finish(self) -> None:
        """Write every table as one file."""
        self.flush()
        for table in self._grown():
            table.finish()

    @property
    def evaluated(self) -> bool:
        """Whether the last round was evaluated."""
        return bool(self._evaluated) and self._evaluated[-1] == len(self) - 1

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """The rows of ``rounds.parquet`` so far."""
        return tuple(self._rounds)

    @property
    def counts(self) -> dict[str, list[int]]:
        """Rows of outcomes that are listed and of ``EACH`` of rounds done, and of all but the last evaluation, for ``restore``."""
        last = {name: size for name, (index, size) in self._newest.items() if index == len(self) - 1}
        return {name: [rows, rows - last.get(name, 0)] for name, rows in self._counts.items()}

    @property
    def participation(self) -> dict[str, torch.Tensor] | None:
        """Outcomes of rounds done, where they are counted, for ``restore``."""
        return None if self._counted is None else self._counted.state()

    def evaluations(self) -> list[dict[str, float]]:
        """Return the metrics of the rounds that were evaluated."""
        return [{k: self._rounds[i][k] for k in self.metrics} for i in self._evaluated]

    def restore(
        self,
        rounds: int,
        *,
        every: int,
        evaluated: bool,
        counts: Mapping[str, Sequence[int]] | None = None,
        participation: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Go back to the tables after so many rounds, evaluated ``every`` so many, the last of them ``evaluated`` or not.

        ``counts`` and ``participation`` are of the checkpoint. Raises ConfigError for tables that cannot be read or lack rows, and
        ValueError.
        """
        frame = parquet.read(self.folder / "rounds.parquet")
        self.metrics = tuple(c for c in frame.columns if c.startswith("eval/"))
        self._rounds = frame[frame["round"] < rounds].to_dict("records")  # pyright: ignore
        if len(self) < rounds:
            raise ValueError(f"rounds.parquet has {len(self)} of {rounds} rounds")
        frame = parquet.read(self.folder / "phases.parquet")
        self._phases = frame[frame["round"] < rounds].to_dict("records")  # pyright: ignore
        measured = rounds if evaluated else rounds - 1
        for name in EACH:
            if (like := _like(self.folder / f"{name}.parquet")) is not None:
                self._each[name] = Parts(self.folder / f"{name}.parquet", like)
        if self._counted is not None:
            self._counted = Participation(participation)
        listed = [] if self._outcomes is None else [("outcomes", self._outcomes, rounds)]
        for name, table, end in [*listed, *((n, t, measured) for n, t in self._each.items())]:
            self._counts[name] = table.finish(lambda rows, end=end: rows.filter(pc.less(rows["round"], end)))  # pyright: ignore
        for name, (whole, before) in (counts or {}).items():
            wanted = whole if evaluated or name == "outcomes" else before
            if self._counts[name] != wanted:
                raise ValueError(f"{name}.parquet has {self._counts[name]} of {wanted} rows")
        if not evaluated and self._rounds:
            self._rounds[-1] |= dict.fromkeys(self.metrics)
        last = [rounds - 1] if evaluated and rounds % every and _any(self._rounds[-1], self.metrics) else []
        self._evaluated = [*range(every - 1, measured, every), *last]

    def _grown(self) -> list[Parts]:
        return [*([] if self._outcomes is None else [self._outcomes]), *self._each.values()]


def named(numbers: Iterable[int], names: Sequence[str]) -> list[str]:
    """Return the names of numbers; of those beyond the names, the number as text."""
    return [names[k] if k < len(names) else str(k) for k in numbers]


def _like(path: Path) -> pa.Schema | None:
    """Return a table's columns, from its file or a part of it; None where there is neither."""
    first = path if path.exists() else next(path.with_suffix("").glob("*.parquet"), None)
    if first is None:
        return None
    with parquet.readable(first) as file:
        return file.schema_arrow


def _any(row: Mapping[str, float], names: tuple[str, ...]) -> bool:
    return any(row[name] == row[name] for name in names)  # NaN where there is none


def _lengthened(values: np.ndarray, size: int) -> pa.Array:
    """Return a column of so many rows, null after the values, and where one is NaN."""
    column = pa.array(values, from_pandas=True)
    return column if len(values) == size else pa.concat_arrays([column, pa.nulls(size - len(values), column.type)])


def _table(rows: Sequence[Mapping[str, Any]], types: Mapping[str, pa.DataType]) -> pa.Table:
    """Return a table of these columns, null where a row has no value or NaN."""
    return pa.table({name: _column([row.get(name) for row in rows], kind) for name, kind in types.items()})


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(np.array(values, np.float64) if kind == FLOAT else values, kind, from_pandas=True)
