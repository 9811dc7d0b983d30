"""Run an experiment, or go on with one, and write its run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO

import torch

from fedfleet.algorithms.options import rate_left
from fedfleet.assembly.prepared import Prepared
from fedfleet.assembly.user_parts import check_same
from fedfleet.assembly.weights import nets
from fedfleet.config.advice import advice
from fedfleet.config.reading import check_free
from fedfleet.datasets.vocabulary import VOCABULARY
from fedfleet.experiments.checkpoint import Checkpoint, newest
from fedfleet.experiments.run import Run
from fedfleet.experiments.runfolder import CHECKPOINTS, RunFolder, claimed, locked
from fedfleet.experiments.runner import Runner
from fedfleet.experiments.same_run import check_unchanged
from fedfleet.experiments.status import Status
from fedfleet.experiments.tracker_setup import configured, trackers
from fedfleet.experiments.workers import Workers
from fedfleet.files.summary import ended
from fedfleet.report import write_card
from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.errors import ConfigError
from fedfleet.tasks.weights_file import marks
from fedfleet.tracking.callback import Callback, Callbacks, checked


class Experiment(Prepared):
    """A configuration made ready to run, data loaded and everything checked, and its runs.

    Args: as of ``fedfleet.run``; ``config`` is what ``fedfleet.load`` returned, ``loaded`` the configured data set, if it has been
    read. Raises ConfigError or DataError for input that cannot run.
    """

    @fresh_settings()
    def run(
        self,
        out: Path,
        callbacks: Callback | Sequence[Callback] = (),
        workers: Workers | None = None,
        pause: int | None = None,
    ) -> Run:
        """Run to the end, telling ``callbacks``, and write the run folder ``out``, which must be new.

        Args:
            out: the run folder.
            callbacks: who is told, and may stop it.
            workers: kept for the next run.
            pause: rounds after which the run stops, evaluated, to be gone on with or not; unlike with fewer ``rounds``, nothing in
                it is planned for an earlier end.

        An interruption (KeyboardInterrupt, SystemExit) or an error still leaves the tables, the model, a summary with the
        status, and a checkpoint to go on from. Raises ConfigError for a folder that is taken, FedfleetError for a run that failed.
        """
        told = self._told(callbacks)
        check_free(out)
        self.try_out()
        with claimed(out) as lock:
            return self._run(out, None, told, workers, pause, lock)

    @fresh_settings()
    def resume(
        self,
        folder: Path,
        callbacks: Callback | Sequence[Callback] = (),
        workers: Workers | None = None,
        pause: int | None = None,
    ) -> Run:
        """Go on with the run in a folder from its last checkpoint; the result is that of a run that was never interrupted.

        Args: as of ``run``; ``folder`` is that of the run. Raises ConfigError where there is no checkpoint to go on from, or
        where it is of another run, FedfleetError for a run that failed.
        """
        told = self._told(callbacks)
        self.try_out()
        with closing(locked(folder)) as lock:
            return self._run(folder, self._last(folder, told.say), told, workers, pause, lock)

    def _told(self, callbacks: Callback | Sequence[Callback]) -> Callbacks:
        """Return who is told: those that are given, and those that the configuration names, made anew. Raises ConfigError."""
        told = Callbacks(checked(callbacks))
        for name, each in configured(self.config):
            told.add([each], name)
        return told

    def _last(self, folder: Path, say: Callable[[str], None]) -> Checkpoint:
        """Return the checkpoint to go on from. Raises ConfigError."""
        result, faults = newest(folder / CHECKPOINTS)
        if result is None:
            raise ConfigError(f"{folder}: {faults[0] if faults else 'no checkpoint to go on from'}: start the run anew")
        ended(folder)
        for fault in faults:
            say(f"{fault}; an earlier checkpoint is taken")
        check_same(folder, result.account["own"], self.own)
        check_unchanged(folder, result.account.get("config", {}), self.config)
        if result.account["data"] != self.fingerprint:
            raise ConfigError(
                f"{folder}: its clients or test data were others: give the data of the run, or start a new run"
            )
        before, scorer = result.account.get("scorer"), self.prepare(say)
        if before is not None and before != scorer:
            raise ConfigError(
                f"{folder}: its images were judged by {before}, and here would be by {scorer}: bring the run's classifier to this "
                f"machine's cache, or start a new run"
            )
        return result

    def advice(self) -> list[str]:
        """Return lines on what of the data, of the net for them, and of who takes part will rarely do."""
        if self.config.task.name == "language_model":  # integers are words
            return [*self.cohort_advice, *self.participation_advice]
        of_data = advice(self.evaluation["test"]["x"], self.names.features, self.examples.get("words", 0))
        return [*of_data, *self.net_advice, *self.cohort_advice, *self.participation_advice]

    def _folder(self, out: Path, lock: IO[str] | None) -> RunFolder:
        words = self.names.vocabulary
        beside = {} if words is None else {VOCABULARY: words.dumped()}
        return RunFolder(out, self.config.model_dump(mode="json"), lock, beside | nets(self.config), marks(words))

    def _run(
        self,
        out: Path,
        result: Checkpoint | None,
        told: Callbacks,
        workers: Workers | None,
        pause: int | None = None,
        lock: IO[str] | None = None,
    ) -> Run:
        with (
            torch.random.fork_rng(devices=[]),
            torch.set_grad_enabled(torch.is_grad_enabled()),  # an interruption may come between its being set and reset
            closing(Workers()) as own,
            (workers or own).of(self) as executor,
            closing(self._folder(out, lock)) as folder,
        ):
            told.add([Status(folder), *trackers(self.config, folder, told.say)])
            runner = Runner(self, folder, told, pause)
            for line in self.advice():
                if workers is None or workers.first(line):
                    told.say(line)
            if result is not None:
                runner.resume(result)
            run = runner.run(executor)
            with folder.writing():
                write_card(out, self.net_code, partial(rate_left, self.config.algorithm))
            return run
