"""One run under way: rounds, evaluation beside them, tables, checkpoints, and what is left behind however it ends."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import nn

from fedfleet.config import resolve, secured
from fedfleet.config.schema import named
from fedfleet.experiments.checkpoint import Checkpoint
from fedfleet.experiments.executors import EXECUTORS
from fedfleet.experiments.prepared import Prepared
from fedfleet.experiments.progress import Tracker
from fedfleet.experiments.runfolder import BEST, RunFolder
from fedfleet.experiments.weights import net_of
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.client_metrics import ClientMetrics
from fedfleet.simulator.driver.codec import encode
from fedfleet.simulator.driver.evaluation import Measured, Measurement, less_is_better, summarised
from fedfleet.simulator.driver.records import PhaseRecord
from fedfleet.simulator.driver.server import model
from fedfleet.simulator.driver.simulate import RoundRecord, Void, play, start
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.signals import put_off


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its summary, its tables."""

    folder: Path
    summary: Mapping[str, Any]
    task: Task | None = None

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the run folder: "rounds", "phases", "fates" or "clients"."""
        return pd.read_parquet(self.folder / f"{name}.parquet")

    @property
    def rounds(self) -> pd.DataFrame:
        """Return ``rounds.parquet``."""
        return self.table("rounds")

    def model(self, which: Literal["last", "best"] = "last") -> nn.Module:
        """Return the task's net, as it is made, with the weights of the last or of the best model, in eval mode.

        It is a ``torch.nn.Module`` like any other. Raises ConfigError for a task of no single net, such as a minimax one.
        """
        file = {"last": "model.safetensors", "best": BEST}.get(which)
        if file is None:
            raise ConfigError(f"model={which!r}: give last or best")
        return net_of(self.folder, self.summary, file, self.task)


class _Held(NamedTuple):
    """A round whose evaluation is under way."""

    record: RoundRecord
    evaluation: _Evaluation


class _Evaluation(NamedTuple):
    """An evaluation under way, and what has been found of clients, where they are evaluated."""

    measurement: Measurement
    clients: ClientMetrics | None


class Runner:
    """A run. A round is evaluated while the next one runs, and enters the tables after that.

    The position never runs ahead of the tables by more than one round: the one whose evaluation is under way.
    """

    def __init__(self, experiment: Prepared, folder: RunFolder, progress: Tracker):
        self.x, self.folder, self.progress = experiment, folder, progress
        self.conditions = experiment.conditions()
        self.at = start(
            experiment.algorithm, experiment.z, experiment.problem, self.conditions, folder.checkpoints.states
        )
        encode(self.at.state)  # what cannot be kept is said before the work
        self.initial: dict[str, float] | None = None
        self.scorer: str | None = None
        self.of_last: dict[str, float] = {}  # of the last model, on all test examples
        self.best: dict[str, float] = {}  # of every metric, the initial model's included
        self.selected: Mapping[str, float] = {}  # what was measured of the model that is kept as the best
        self.invites = {experiment.config.cohort.invite}  # what is known of
        self.held: _Held | None = None
        self.last: RoundRecord | None = None
        self.void: list[PhaseRecord] = []
        self.unevaluated = False
        self.diverged: str | None = None
        self.seconds_before = 0.0
        self.started = self.saved = time.monotonic()

    def resume(self, found: Checkpoint) -> None:
        """Go back to a checkpoint before ``run``. Raises StateError."""
        self.folder.checkpoints.restore(found, self.at)
        self.initial = found.account["initial"]
        self.seconds_before = found.account["seconds"]
        every, done = self.x.config.evaluation.every, found.rounds
        # A round that was evaluated only because it was the last is one of many now.
        early = bool(done % every) and done < self.x.config.rounds
        missing = 0 < done == self.x.config.rounds and not found.account["evaluated"]
        self.unevaluated = (found.account["unevaluated"] and not early) or missing
        self.folder.restore(done, every=every, evaluated=not (early or self.unevaluated))
        if unknown := [what for about in self.x.own.values() for what in about["not_recorded"]]:
            with self.folder.writing():
                self.folder.log([{"round": done, "event": "not_compared", "of": unknown, "bit_exact": False}])
        if not (done % every and self.folder.tables.evaluated):
            self.folder.restore_best()
        for metrics in [self.initial or {}, *self.folder.tables.evaluations()]:
            self._is_best(metrics)

    def run(self, executor: Executor) -> Run:
        """Run to the end, and whatever happens leave tables, model, summary and a checkpoint."""
        status, error = "failed", None
        try:
            self.progress.say(f"starting: {describe(self.x)}")
            self.scorer = self.x.prepare(self.progress.say)
            executor.start(self.x.setup())
            status = self._rounds(executor)
            self.of_last = self._measure_last(executor)
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        except FedfleetError as e:
            error = str(e)
            self.void = e.phases if isinstance(e, Void) else []
            raise
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            self.progress.close()
            self._watch(executor)
            self._enter_all()
            summary = self._summary(status, error)
            try:
                self._save()
            finally:
                self.folder.finish(self._model(), summary)
        if (images := self.x.images(self._model())) is not None:
            self.folder.keep_images(images)
        if (plane := self.x.plane(self._model())) is not None:
            self.folder.keep_plane(plane)
        return Run(self.folder.folder, summary, self.x.task)

    def _rounds(self, executor: Executor) -> str:
        x, gauges = self.x, EXECUTORS[self.x.config.executor.kind].gauges()
        if self.initial is None:
            self.initial, _ = self._result(self._measure(executor, None), self.at.state, 0)
            self.folder.tables.metrics = tuple(self.initial)
            self._save()
        self.progress.initial(self.initial, self.at.index)
        if self.unevaluated:
            self._evaluate_again(executor)
        if self._reached(self._newest()) or self._out_of_budget():
            return "stopped"
        while self.at.index < x.config.rounds:
            record = play(x.algorithm, self.at, x.problem, self.conditions, executor)
            if gauges is not None:
                gauges.show(record, executor)
            self._watch(executor)
            self._settle()
            with put_off(), self.folder.writing():
                self.at.accept(record)
                out_of_time = x.config.max_seconds is not None and self._seconds() > x.config.max_seconds
                self.diverged = self._diverged(record)
                self._note_sizes(record)
                ends = out_of_time or self.diverged is not None or self._out_of_budget()
                last = ends or self.at.index == x.config.rounds
                self.last, self.unevaluated = record, last or self.at.index % x.config.evaluation.every == 0
            if not self.unevaluated:
                self._enter(record, {})
            else:
                self.held = _Held(record, self._measure(executor, record.index))
                if (last or x.config.until is not None) and (self._reached(self._settle()) or ends):
                    if self.diverged is not None:
                        self.progress.say(f"stopped: {self.diverged}: lower the learning rates, or clip gradients")
                    return "stopped"
            every_s = x.config.checkpoint.every_s
            if every_s is not None and time.monotonic() - self.saved >= every_s and self.at.index < x.config.rounds:
                self._settle()
                self._save()
        return "finished"

    def _out_of_budget(self) -> bool:
        """Say whether another round could spend more privacy than clients were promised."""
        spent = [p for p in self.x.promises if self.at.index < self.x.config.rounds and not p.allows(self.at.state)]
        for p in spent:
            self.progress.say(f"stopped: another round could spend more than {p.key}.epsilon={p.budget:g}")
        return bool(spent)

    def _note_sizes(self, record: RoundRecord) -> None:
        """Enter what an algorithm of one's own invites other than the configuration says, the first time it does."""
        if "algorithm" not in self.x.written or self.x.algorithm.asynchronous:
            return
        said = self.x.config.cohort.invite
        for size in sorted(record.asked_for - self.invites):
            event = {"event": "other_cohort", "invited": size, "cohort.invite": said, "bit_exact": True}
            self.folder.log([{"round": record.index, **event}])
        self.invites |= record.asked_for

    def _diverged(self, record: RoundRecord) -> str | None:
        """Say in which way training has diverged, where the run is to stop then."""
        bound = self.x.config.stop_if_diverged
        if bound is None:
            return None
        most = math.inf if bound == "not_finite" else bound
        for phase in record.phases:
            loss = phase.train_loss
            if loss is not None and not (math.isfinite(loss) and loss <= most):
                above = f", above stop_if_diverged={most:g}" if math.isfinite(loss) else ""
                return f"round {record.index}, phase {phase.phase!r}: the training loss is {loss:g}{above}"
        if not all(bool(leaf.isfinite().all()) for leaf in T.leaves(self._model())):
            return f"round {record.index}: the model is not finite"
        return None

    def _watch(self, executor: Executor) -> None:
        """Enter what has happened to the workers."""
        with self.folder.writing():
            self.folder.log([{"round": self.at.index, **event} for event in executor.events])
        executor.events.clear()

    def _evaluate_again(self, executor: Executor) -> None:
        """Evaluate the round of the checkpoint, whose evaluation was under way."""
        evaluation = self._measure(executor, self.at.index - 1)
        metrics, domains = self._result(evaluation, self.at.state, self.at.index)
        self._enter_domains(self.at.index - 1, domains)
        self.folder.tables.measured(metrics)
        self.unevaluated = False

    def _evaluate_clients(self, executor: Executor, index: int | None) -> ClientMetrics | None:
        """Evaluate clients on their own data, and enter that after round ``index``."""
        at = self.at
        found = self.x.evaluate_clients(executor, self._model(), at.state, at.index, at.memory.store)
        if found is not None and index is not None:
            with put_off(), self.folder.writing():
                self.folder.tables.add_each("clients", index, found.found)
        return found

    def _settle(self) -> dict[str, float]:
        """Wait for the evaluation of the round that is held, and enter both."""
        if self.held is None:
            return {}
        record, evaluation = self.held
        metrics, domains = self._result(evaluation, record.state, record.index + 1)
        self._enter(record, metrics, domains)
        return metrics

    def _result(self, evaluation: _Evaluation, state: Any, rounds: int) -> Measured:
        """Wait for the evaluation of the state after so many rounds; write its model if no earlier one was as good."""
        found, domains = evaluation.measurement.result()
        if (clients := evaluation.clients) is not None:
            by_domain = clients.by_domain(self.x.client_domains)
            found, domains = {**found, **clients.summary(), **summarised(by_domain)}, {**domains, **by_domain}
        found |= self.x.of_state(state)
        if self.x.algorithm.domains is not None:
            domains = {**self.x.algorithm.domains(state), **domains}
        metrics = {f"eval/{name}": value for name, value in found.items()}
        if self._is_best(metrics):
            last = bool(rounds % self.x.config.evaluation.every)
            self.folder.keep_best(self.x.algorithm.views["global"].params(state), provisional=last)
        return Measured(metrics, domains)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Enter an evaluation, and say whether its model is the best by what models are selected by."""
        name = self.x.config.checkpoint.best
        name = next(iter(metrics), None) if name == "auto" else name
        better = _better(self.best, metrics)
        self.best |= better
        if name in better:
            self.selected = metrics
        return name in better

    def _enter_domains(self, index: int, domains: Mapping[str, torch.Tensor]) -> None:
        if domains:
            with self.folder.writing():
                self.folder.tables.add_each("domains", index, domains)

    def _enter(
        self, record: RoundRecord, metrics: Mapping[str, float], domains: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        with put_off():
            self._enter_domains(record.index, domains or {})
            row = self.folder.add(record, metrics)
            self.held, self.unevaluated = None, False
        self.progress.round(row, [p.counts for p in record.phases], self.x.config.rounds)

    def _enter_all(self) -> None:
        """Enter the round whose evaluation has not come to its end, and the attempts at one that failed."""
        if self.last is not None and len(self.folder.tables) < self.at.index:
            self.folder.add(self.last, {})
        self.folder.tables.add_phases(self.at.index, self.void)

    def _save(self) -> None:
        account = {
            "initial": self.initial,
            "seconds": self._seconds(),
            "unevaluated": self.unevaluated,
            "evaluated": self.folder.tables.evaluated,
            "own": self.x.own,
            "data": self.x.fingerprint,
            "scorer": self.scorer,
        }
        if self.initial is not None:
            with self.folder.writing():
                self.folder.tables.flush()
                self.folder.checkpoints.write(self.at, account)
        self.saved = time.monotonic()

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _model(self) -> T.Tree:
        return model(self.x.algorithm, self.at.state)

    def _measure(self, executor: Executor, index: int | None) -> _Evaluation:
        measurement = Measurement(executor, self.x.task, self._model(), self.x.evaluation)
        return _Evaluation(measurement, self._evaluate_clients(executor, index))

    def _measure_last(self, executor: Executor) -> dict[str, float]:
        """Return the metrics of the last model on all test examples, where only some were evaluated on so far."""
        found = Measurement(executor, self.x.task, self._model(), self.x.final).result().metrics
        return {f"eval/{name}": value for name, value in found.items()}

    def _newest(self) -> Mapping[str, float]:
        """Return the last evaluation."""
        found = self.folder.tables.evaluations()
        return found[-1] if found else self.initial or {}

    def _reached(self, metrics: Mapping[str, float]) -> bool:
        if self.x.config.until is None:
            return False
        metric, at_least, value = resolve.parse_until(self.x.config.until)
        found = metrics.get(metric)
        return found is not None and (found >= value if at_least else found <= value)

    def _summary(self, status: str, error: str | None) -> dict[str, Any]:
        x, rounds = self.x, self.folder.tables.rounds()
        totals = ("floats_up", "floats_down", "bytes_up", "bytes_down", "virtual_s")
        return {
            "status": status,
            "error": error,
            "diverged": self.diverged,
            "label": self.x.label,
            "own": self.x.own,
            "scorer": self.scorer,
            "domains": list(self.x.domain_names),
            "examples": self.x.examples,
            "rounds": len(rounds),
            "initial": self.initial or {},
            "final": {**self._newest(), **self.of_last},
            "best": self.best,
            "selected": self.selected,
            "median_seconds_per_round": statistics.median(rounds["seconds"]) if len(rounds) else None,
            "seconds": self._seconds(),
            "model_floats": T.count(self._model()),
            "bit_exact": self.folder.bit_exact,
            "privacy": None,
            **{promise.key: promise.said(self.at.state) for promise in x.promises},
            "secure_aggregation": secured.said(x.config, x.algorithm),
            **{name: rounds[name].sum().item() for name in totals},
        }


def _better(best: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are better than ever before."""
    sign = {name: -1 if less_is_better(name) else 1 for name in metrics}
    return {
        name: value
        for name, value in metrics.items()
        if math.isfinite(value) and (name not in best or sign[name] * value > sign[name] * best[name])
    }


def describe(x: Prepared) -> str:
    """Say in one line what is run, and on what."""
    e = x.config.executor
    where = EXECUTORS[e.kind].describe(x.config)
    return (
        f"{x.label} on {named(x.config, 'task')}, {named(x.config, 'population.dataset')}, {x.problem.clients:,} clients, "
        f"{T.count(x.z):,} floats, {e.inner} on {where}"
    )
