"""A finished run, as it is returned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from fedfleet.assembly import onnx_file
from fedfleet.assembly.weights import net_of, save_adapters, save_state_dict, shape_of
from fedfleet.datasets.vocabulary import VOCABULARY, Encoded, Vocabulary, read_vocabulary
from fedfleet.experiments.frames import Whole
from fedfleet.experiments.runfolder import BEST
from fedfleet.files import parquet
from fedfleet.files.documents import is_there
from fedfleet.files.summary import SUMMARY, checked_summary
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.tasks.weights_file import marks

WIDTH, HEIGHT, EDGE = 420, 150, 34  # pixels of the curve, and around it
COLOR = "#0072B2"
LARGE = 1e6  # from which on a number is written with its power of ten
NAMED = 6  # runs of a folder of several that are named


def open_run(folder: Path | str, task: Task | None = None, *, trust: bool = False) -> Run:
    """Return the run in a folder, as ``fedfleet.run`` returned it when it ended; nothing is computed.

    Args:
        folder: what was given as ``out``, or the folder of one of several runs.
        task: the one made in Python that the run had, if any, for ``model()``.
        trust: let ``model()`` call code that the folder names also where no run of this user's on this machine wrote that.

    Raises ConfigError where no run has ended there, and where a file of it is missing, damaged or changed.

    """
    folder = Path(folder)
    if task is not None and not hasattr(task, "objectives"):
        raise ConfigError(
            f"open_run: task={show(task)}: it is no task: make it one by fedfleet.tasks.from_module(net, loss=…)"
        )
    if not is_there(folder):
        raise ConfigError(f"{folder}: no such folder: give what was given as out")
    if not is_there(folder / SUMMARY):
        result = folder.glob(f"*/**/{SUMMARY}")
        below = sorted(str(path.parent.relative_to(folder)) for path in result)
        some = ", ".join(below[:NAMED]) + (", …" if len(below) > NAMED else "")
        fix = f"there are {some}: give one of these" if below else "give the folder of a run that has ended"
        raise ConfigError(f"{folder}: no {SUMMARY} there: {fix}")
    return Run(folder, checked_summary(folder), task, trust)


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run: its folder, its summary, its tables. A notebook shows it as a table and a curve."""

    folder: Path
    summary: Mapping[str, Any]
    task: Task | None = None
    trust: bool = False

    def __repr__(self) -> str:
        """Return a line: where it is, how it ended, the last metrics; ``summary`` has all that there is."""
        metrics = ", ".join(
            f"{k.removeprefix('eval/')} {_number(v)}" for k, v in (self.summary.get("final") or {}).items()
        )
        ended = f"{self.summary.get('status')}, {self.summary.get('rounds')} rounds"
        return f"Run({str(self.folder)!r}: {ended}{metrics and f', {metrics}'})"

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the run folder by its name, one of ``tables``: "rounds", "phases", "outcomes" and others.

        Raises FileNotFoundError where there is none, ConfigError for one that cannot be read.
        """
        path = self.folder / f"{name}.parquet"
        if not self.folder.exists():
            raise FileNotFoundError(f"{self.folder}: no such folder: the run's was moved or removed")
        if not path.exists():
            raise FileNotFoundError(f"{path}: this run has no such table; there are {', '.join(self.tables) or 'none'}")
        return Whole(parquet.read(path))

    @property
    def tables(self) -> list[str]:
        """Return the names of the tables that there are, for ``table``."""
        return sorted(file.stem for file in self.folder.glob("*.parquet"))

    @property
    def rounds(self) -> pd.DataFrame:
        """Return ``rounds.parquet``, a row a round."""
        return self.table("rounds")

    def by_participation(self) -> pd.DataFrame:
        """Return metrics of clients grouped by how many rounds of the run they completed, a row an evaluation and group.

        ``round`` counts from 0, as in the run's tables, and ``rounds`` are those done. ``least`` and ``most`` are what a client of
        the group completed in the whole run.
        Groups are "never", and "rarely", "sometimes" and "often", the thirds of the others; "mean of clients" counts each client
        once, "participation-weighted" as often as it completed a round. Raises ConfigError for a run without
        ``evaluation.per_client``.
        """
        from fedfleet.report import participation_groups
        from fedfleet.report.figures import client_metrics
        from fedfleet.report.tables import read

        run = read(self.folder)
        if not (columns := client_metrics(run)):
            raise ConfigError(
                f"{self.folder}: no client was measured by itself: set evaluation.per_client=true in a new run"
            )
        return Whole(participation_groups.frame(run, columns))

    def model(self, which: Literal["last", "best", "base"] = "last") -> nn.Module:
        """Return the task's net, as it is made, with the weights of the last or of the best model, in eval mode.

        It is a ``torch.nn.Module`` like any other. Adapters are added to the weights that they are of; "base" is the net without
        them. Raises ConfigError for a task of no single net, such as a minimax one, or one that was made in Python and is not known
        here, or whose code no run of this user's wrote and is not trusted; FedfleetError where the file cannot be read.
        """
        file = None if which == "base" else self._file(which)
        return net_of(self.folder, self.summary, file, self.task, trust=self.trust)

    def save_state_dict(self, path: Path | str, which: Literal["last", "best", "base"] = "last") -> Path:
        """Write the ``state_dict`` of ``model(which)``, which the same net loads by ``load_state_dict``, and return its path.

        A name that ends in ``.safetensors`` or ``.pt`` says in which format; a file that is there is replaced. Raises ConfigError
        for another name, and where ``model`` does, FedfleetError where it cannot be written.
        """
        return save_state_dict(self.model(which), Path(path), marks(self.vocabulary))

    def export(self, path: Path | str, which: Literal["last", "best"] = "last") -> Path:
        """Write ``model(which)`` as ONNX, for any number of examples, and return its path; torch's exporter makes it.

        Its outputs are compared with the net's on random examples. ``path`` ends in ``.onnx``; a file that is there is replaced. It
        takes ``pip install 'fedfleet[onnx]'``. Raises ConfigError for another name, without these packages, and where ``model``
        does; FedfleetError where torch cannot export the net, or outputs differ.
        """
        net, inputs = self.model(which), self._inputs()
        return onnx_file.export(net, inputs, Path(path), ("x",) if len(inputs) == 1 else ("tokens", "mask"))

    def _inputs(self) -> tuple[Tensor, ...]:
        """Return random examples such as the net reads."""
        about, rows = shape_of(self.folder, self.summary), onnx_file.ROWS
        if self.vocabulary is not None:
            return tuple(self.encode(["a text that is read", "and another"] * (rows // 2)))
        draw = torch.Generator().manual_seed(0)
        if about.words:
            return (torch.randint(about.words, (rows, *about.example), generator=draw),)
        return (torch.randn((rows, *about.example), generator=draw),)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary by which the run read texts; None where it read none, or numbers of tokens."""
        return read_vocabulary(self.folder) if (self.folder / VOCABULARY).exists() else None

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return new texts as the run's were read: ``tokens`` and ``mask`` (n, L), as in ``run.model()(*run.encode(texts))``.

        Raises ConfigError where the run read no texts, DataError for what is none.
        """
        if (known := self.vocabulary) is None:
            raise ConfigError(
                f"{self.folder}: it read no texts, or numbers of tokens that others made: encode as they did"
            )
        return known.encode(texts)

    def save_adapters(self, out: Path | str, which: Literal["last", "best"] = "last") -> Path:
        """Write the adapters of the last or of the best model into a folder as PEFT does, and return it.

        Raises ConfigError where the task has none.
        """
        return save_adapters(self.folder, self.summary, self._file(which), self.task, Path(out), trust=self.trust)

    def _file(self, which: str) -> str:
        file = {"last": "model.safetensors", "best": BEST}.get(which)
        if file is None:
            raise ConfigError(f"model={which!r}: give last or best")
        return file

    def _repr_html_(self) -> str:
        """Return what a notebook shows: how it ended, each metric's first, last and best value, the first metric by round."""
        said = self.summary
        initial, final, best = (said.get(key) or {} for key in ("initial", "final", "best"))
        rows = "".join(
            f"<tr><td>{escape(name.removeprefix('eval/'))}</td>"
            + "".join(f"<td>{_number(result.get(name))}</td>" for result in (initial, final, best))
            + "</tr>"
            for name in {**initial, **final}
        )
        ended = escape(f"{said.get('status')}, {said.get('rounds')} rounds, {said.get('seconds') or 0:,.1f} s")
        why = said.get("stopped") or {}
        stopped = f"<br>stopped by {escape(str(why['by']))}: {escape(str(why['why']))}" if why else ""
        return (
            f"<div><b>{escape(str(said.get('label')))}</b> {ended}{stopped}<br><code>{escape(str(self.folder))}</code>"
            f"<table><thead><tr><th>metric</th><th>initial</th><th>final</th><th>best</th></tr></thead><tbody>{rows}</tbody></table>"
            f"{self._curve()}</div>"
        )

    def _curve(self) -> str:
        """Return the first metric over rounds as an SVG, empty where the tables are gone or have too few points of it."""
        initial = self.summary.get("initial") or {}
        name = next(iter(initial), None)
        try:
            rounds = self.rounds
        except (OSError, ValueError):
            return ""
        if name is None or name not in rounds:
            return ""
        points = [(0.0, initial[name]), *zip(rounds["round"] + 1.0, rounds[name], strict=True)]
        known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
        return svg(known, name.removeprefix("eval/")) if len(known) > 1 else ""


def svg(points: Sequence[tuple[float, float]], name: str) -> str:
    """Return a line through points as an SVG element with its extremes written beside the axes."""
    xs, ys = zip(*points, strict=True)
    low, high, last = min(ys), max(ys), max(xs)
    across, up = (WIDTH - 2 * EDGE) / (last or 1), (HEIGHT - 2 * EDGE) / ((high - low) or 1)
    line = " ".join(f"{EDGE + x * across:.1f},{HEIGHT - EDGE - (y - low) * up:.1f}" for x, y in points)
    base = HEIGHT - EDGE
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="sans-serif" font-size="10" fill="#888"><title>{escape(name)} by round</title>'
        f'<path d="M{EDGE} {EDGE}V{base}H{WIDTH - EDGE}" fill="none" stroke="#888" stroke-width="0.7"/>'
        f'<polyline points="{line}" fill="none" stroke="{COLOR}" stroke-width="1.7"/>'
        f'<text x="{EDGE}" y="{EDGE - 8}">{escape(name)}</text>'
        f'<text x="{EDGE - 3}" y="{EDGE + 3}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{EDGE - 3}" y="{base}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{EDGE}" y="{base + 13}">0</text>'
        f'<text x="{WIDTH - EDGE}" y="{base + 13}" text-anchor="end">{last:,.0f} rounds</text></svg>'
    )


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:.4f}" if abs(value) < LARGE else f"{value:.4g}"
