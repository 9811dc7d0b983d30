"""Weights & Biases, online or offline: a run of its project for each of ours."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from fedfleet.files.writing import write_text
from fedfleet.simulator.arithmetic.system import NO_LINK
from fedfleet.simulator.registry import Options
from fedfleet.tracking.base import Tracker, concluded, noted, parameters
from fedfleet.tracking.callback import Begun

STEP = "rounds"
WIDTH = 12  # digits of a step


class WandbOptions(Options):
    """Weights & Biases."""

    project: str = Field(default="fedfleet", min_length=1)
    """Name of the project."""
    entity: str | None = None
    """User or team; the default of the account if not given."""
    group: str | None = None
    """Runs that belong together; the label, so that seeds are one group, if not given."""
    tags: list[str] = Field(default=[])
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline: files for ``wandb sync`` alone; $WANDB_MODE, else online, if not given."""
    dir: str | None = None
    """Folder of W&B's own files; the run folder if not given."""


class Wandb(Tracker):
    """Enters each round once, under the key ``rounds``, by which charts are drawn. The run folder notes how far it is.

    W&B takes no step twice and none back, and offline it does not know what was written before.
    """

    def __init__(self, options: WandbOptions):
        self._options = options
        self._at = None

    def open(self, run: Begun) -> None:
        """Go on with the run that the run folder has noted, or begin one."""
        import wandb  # here: it takes half a second

        note, given = run.folder / "wandb.json", self._options
        project = {"project": given.project, "entity": given.entity}
        before = noted(note)
        goes_on = {k: before.get(k) for k in project} == project and isinstance(before.get("run"), str)
        called = before["run"] if goes_on else uuid.uuid4().hex[:8]
        if not goes_on:
            (run.folder / "wandb.step").unlink(missing_ok=True)
            write_text(note, json.dumps({**project, "run": called}) + "\n")
        self._run: Any = wandb.init(
            **project,
            id=called,
            resume="allow",
            name=run.name,
            group=given.group or str(run.config.get("label") or run.name.rpartition(" seed ")[0]),
            tags=given.tags,
            mode=given.mode,
            dir=given.dir or str(run.folder),
            config=parameters(run.config),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", reinit="create_new", init_timeout=30),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self._done = os.open(run.folder / "wandb.step", os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        text = os.read(self._done, 2 * WIDTH + 1).split()
        self._rows, self._evaluations = map(int, text) if len(text) == 2 else (-1, -1)
        self.where = f"wandb sync {self._run.dir.removesuffix('/files')}" if self._run.offline else self._run.url

    def log(self, step: int, result: Mapping[str, float]) -> None:
        """Enter what has not been entered."""
        rows = {k: v for k, v in result.items() if not k.startswith("eval/") and step > self._rows}
        evaluations = {k: v for k, v in result.items() if k.startswith("eval/") and step > self._evaluations}
        if not rows and not evaluations:
            return
        self._run.log({**rows, **evaluations, STEP: step})
        self._rows = step if rows else self._rows
        self._evaluations = step if evaluations else self._evaluations
        os.pwrite(self._done, f"{self._rows:{WIDTH}} {self._evaluations:{WIDTH}}".encode(), 0)

    def flush(self) -> None:
        """W&B writes as it goes on, in a process of its own."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Enter what is in the summary, and wait until all is sent."""
        said = {"status": summary.get("status"), "error": summary.get("error"), "stopped": summary.get("stopped")}
        self._run.summary.update({**concluded(summary), **{k: v for k, v in said.items() if v is not None}})
        self._run.finish(exit_code=int(summary.get("status") not in ("finished", "stopped")))
        os.close(self._done)
