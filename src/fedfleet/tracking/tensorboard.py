"""TensorBoard: scalars by round, the configuration as text and as hyper-parameters with the last metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedfleet.simulator.registry import Options
from fedfleet.tracking.base import Tracker, concluded, parameters, place
from fedfleet.tracking.callback import Begun

PREFIX = "round/"  # of what has none: TensorBoard makes a section of each


class TensorBoardOptions(Options):
    """Event files for TensorBoard."""

    dir: str | None = None
    """Folder of event files, in which each run gets one of its own; ``tensorboard/`` in the run folder if not given."""


class TensorBoard(Tracker):
    """Writes event files, on a resume all of them anew: what was written after the last checkpoint is not in the tables."""

    def __init__(self, options: TensorBoardOptions):
        self._options = options

    def open(self, run: Begun) -> None:
        """Begin the events anew; the first of them lets a TensorBoard that looks on forget the ones before."""
        from torch.utils.tensorboard import SummaryWriter  # here: it takes tenths of a second
        from torch.utils.tensorboard.summary import hparams

        folder = place(self._options.dir, run, "tensorboard")
        for before in folder.glob("events.out.tfevents.*"):
            before.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self._file: Any = self._writer._get_file_writer()
        metrics = {k: 0.0 for k in run.initial}
        begin, columns, self._ended = hparams(parameters(run.config), metrics)
        for result in (begin, columns):
            self._file.add_summary(result)
        self._writer.add_text("config", _code(run.config))
        self.where = f"tensorboard --logdir {folder}"

    def log(self, step: int, result: Mapping[str, float]) -> None:
        """Write one event with all scalars."""
        from tensorboard.compat.proto import summary_pb2

        event = summary_pb2.Summary()  # pyright: ignore[reportAttributeAccessIssue]
        for key, value in result.items():
            event.value.add(tag=key if "/" in key else f"{PREFIX}{key}", simple_value=value)
        self._file.add_summary(event, step)

    def flush(self) -> None:
        """Have it on the disk."""
        self._writer.flush()

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write what is in the summary."""
        self._writer.add_text("summary", _code(summary))
        step = max(self._step, 0)
        self.log(step, {k: v for k, v in concluded(summary).items() if k.startswith(("final/", "best/", "selected/"))})
        self._file.add_summary(self._ended)
        self._writer.close()


def _code(result: Mapping[str, Any]) -> str:
    """Return plain data as Markdown's code."""
    return "".join(f"    {line}\n" for line in json.dumps(result, indent=2, default=str).splitlines())
