"""One run under way: rounds, evaluation beside them, tables, checkpoints, and what is left behind however it ends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fedfleet.assembly.executors import EXECUTORS
from fedfleet.assembly.prepared import Prepared
from fedfleet.config.platforms import without_ray
from fedfleet.config.timing import local_steps
from fedfleet.experiments.checkpoint import Checkpoint
from fedfleet.experiments.run import Run
from fedfleet.experiments.runfolder import RunFolder
from fedfleet.experiments.same_run import decisive
from fedfleet.experiments.stopping import DIVERGED, Stopping, paused, told
from fedfleet.experiments.sums import LostSums
from fedfleet.middleware.secure_aggregation import wrap as secured
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.driver.client_metrics import ClientMetrics
from fedfleet.simulator.driver.codec import encode
from fedfleet.simulator.driver.evaluation import Measured, Measurement, improved, recalls, says_classes, summarised
from fedfleet.simulator.driver.records import PhaseRecord
from fedfleet.simulator.driver.server import model
from fedfleet.simulator.driver.simulate import RoundAborted, RoundRecord, play, start
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.signals import put_off
from fedfleet.tracking.callback import Begun, Callbacks, Stop

LONGEST_NET = 1000  # characters of the summary
HOW = {
    "serial": "one client at a time",
    "batched": "many at once",
    "factored": "many at once",
}
"""``executor.inner`` in words."""


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

    def __init__(self, experiment: Prepared, folder: RunFolder, told: Callbacks, pause: int | None = None):
        self.x, self.folder, self.told = experiment, folder, told
        self._decisive = decisive(experiment.config)
        self.to = min(experiment.config.rounds, experiment.config.rounds if pause is None else pause)
        self.conditions = experiment.conditions()
        self.at = start(
            experiment.algorithm, experiment.z, experiment.problem, self.conditions, folder.checkpoints.states
        )
        encode(self.at.state)  # what cannot be kept is said before the work
        self.initial: dict[str, float] | None = None
        self.scorer: str | None = None
        self.of_last: dict[str, float] = {}  # of the last model, on all test examples
        self.best: dict[str, float] = {}  # of every metric, the initial model's included
        self.classes: Mapping[str, torch.Tensor] | None = None  # of the last model, if this process has evaluated it
        self.selected: Mapping[str, float] = {}  # what was measured of the model that is kept as the best
        self.invites = {experiment.config.cohort.size}  # what is known of
        self.held: _Held | None = None
        self.last: RoundRecord | None = None
        self.aborted: list[PhaseRecord] = []
        self.unevaluated = False
        self.sums = LostSums()
        self.stopping = Stopping(experiment.config, experiment.promises)
        self.stop: Stop | None = None
        self.seconds_before = 0.0
        self.started = self.saved = time.monotonic()

    def resume(self, result: Checkpoint) -> None:
        """Go back to a checkpoint before ``run``. Raises StateError."""
        self.folder.checkpoints.restore(result, self.at)
        self.initial = result.account["initial"]
        self.seconds_before = result.account["seconds"]
        every, done = self.x.config.evaluation.every, result.rounds
        # A round that was evaluated only because it was the last is one of many now.
        early = bool(done % every) and done < self.to
        missing = 0 < done == self.to and not result.account["evaluated"]
        self.unevaluated = (result.account["unevaluated"] and not early) or missing
        self.folder.restore(done, result.account, every=every, evaluated=not (early or self.unevaluated))
        if unknown := [what for about in self.x.own.values() for what in about["not_recorded"]]:
            with self.folder.writing():
                self.folder.log([{"round": done, "event": "not_compared", "of": unknown, "bit_exact": False}])
        if not (done % every and self.folder.tables.evaluated):
            self.folder.restore_best()
        if self.x.config.checkpoint.best is not None:
            self.folder.check_best(result.account)
        for metrics in [self.initial or {}, *self.folder.tables.evaluations()]:
            self._is_best(metrics)
        self.sums.resume(self.folder.folder, done)

    def run(self, executor: Executor) -> Run:
        """Run to the end, and whatever happens leave tables, model, summary and a checkpoint."""
        status, error = "failed", None
        try:
            for line in (f"starting: {named(self.x)}", f"clients: {how(self.x)}"):
                self.told.say(line)
            if self.x.names.held_out:
                self.told.say(f"tested on {self.x.examples['tested_on']}")
            self.scorer = self.x.prepare(self.told.say)
            setup = self.x.setup()
            setup.gpu.take(setup.device)  # the server's own work
            executor.start(setup, self.told.say)
            if self.x.config.executor.capture == "compiled":
                self.folder.log([{"round": self.at.index, "event": "compiled", "bit_exact": False}])
            if not setup.gpu.deterministic:
                self.folder.log([{"round": self.at.index, "event": "not_deterministic", "bit_exact": False}])
            status = self._rounds(executor)
            self.of_last = self._measure_last(executor)
        except (KeyboardInterrupt, SystemExit) as e:
            status = "interrupted"
            e.add_note(f"after {self.at.index:,} of {self.x.config.rounds:,} rounds")
            raise
        except FedfleetError as e:
            error = str(e)
            self.aborted = e.phases if isinstance(e, RoundAborted) else []
            raise
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            summary = self._finish(executor, status, error)
        if (images := self.x.images(self._model())) is not None:
            self.folder.keep_images(images)
        if (decision_boundary := self.x.decision_boundary(self._model())) is not None:
            self.folder.keep_decision_boundary(decision_boundary)
        return Run(self.folder.folder, summary, self.x.task)

    def _finish(self, executor: Executor, status: str, error: str | None) -> dict[str, Any]:
        """Leave what there is, and tell that the run has ended."""
        summary: dict[str, Any] = {"status": status, "error": error}
        try:
            self._watch(executor)
            self._enter_all()
            summary = self._summary(status, error)
            try:
                self._save()
            finally:
                self.folder.finish(self._model(), self.at.index, summary)
        finally:
            self.told.end(summary)
        return summary

    def _rounds(self, executor: Executor) -> str:
        x, gauges = self.x, EXECUTORS[self.x.config.executor.kind].gauges()
        if self.initial is None:
            self.initial, *_ = self._result(self._measure(executor, None), self.at.state, 0)
            self.folder.tables.metrics = tuple(self.initial)
            self._save()
        self.told.start(self._begun(self.initial))
        if self.unevaluated:
            self._evaluate_again(executor)
        self._ask(self.stopping.until(self._newest()) or self._out_of_budget())
        self._ask_early(self.stopping.patience())
        while self.stop is None and self.at.index < self.to:
            record = play(x.algorithm, self.at, x.problem, self.conditions, executor)
            self.sums.note(record, self.told.say)
            if gauges is not None:
                gauges.show(record, executor)
            self._watch(executor)
            self._settle()
            if self.stop is not None:  # by what was found of the round before
                self.at.memory.discard()
                break
            with put_off(), self.folder.writing():
                self.at.accept(record)
                self._note_sizes(record)
                self._ask(self._ends(record))
                last = self.stop is not None or self.at.index == self.to
                self.last, self.unevaluated = record, last or self.at.index % x.config.evaluation.every == 0
            if self.unevaluated:
                self.held = _Held(record, self._measure(executor, record.index))
                if last or x.config.until is not None:
                    self._ask(self.stopping.until(self._settle()))
            else:
                self._enter(record, Measured({}, {}))
                if self.stop is not None:
                    self._evaluate_again(executor)
            every_s = x.config.checkpoint.every_s
            if every_s is not None and time.monotonic() - self.saved >= every_s and self.at.index < self.to:
                self._settle()
                self._save()
        if self.stop is None and self.at.index == x.config.rounds:
            return "finished"
        self.stop = self.stop or paused(self.at.index, x.config.rounds)
        self.told.say(told(self.stop))
        return "stopped"

    def _begun(self, initial: Mapping[str, float]) -> Begun:
        config = self.x.config
        return Begun(
            folder=self.folder.folder,
            name=f"{self.x.label} seed {config.seed}",
            config=config.model_dump(mode="json"),
            rounds=config.rounds,
            done=self.at.index,
            initial=initial,
            rows=self.folder.tables.rows,
        )

    def _ask(self, stop: Stop | None) -> None:
        """Enter a wish to stop; the first one counts."""
        self.stop = self.stop or stop

    def _ask_early(self, stop: Stop | None) -> None:
        """Enter a wish to stop before the last round for now, after which it is none, or comes when the run goes on."""
        if self.at.index < self.to:
            self._ask(stop)

    def _ends(self, record: RoundRecord) -> Stop | None:
        """Say whether a round is the last, for whatever reason but what is measured of it."""
        diverged = self.stopping.divergence(record.index, record.phases, self._model())
        return diverged or self.stopping.seconds(self._seconds()) or self._out_of_budget()

    def _out_of_budget(self) -> Stop | None:
        return self.stopping.privacy(self.at.state, self.at.index)

    def _note_sizes(self, record: RoundRecord) -> None:
        """Enter what an algorithm of one's own invites other than the configuration says, the first time it does."""
        if "algorithm" not in self.x.written or self.x.algorithm.asynchronous:
            return
        said = self.x.config.cohort.size
        for size in sorted(record.asked_for - self.invites):
            event = {"event": "other_cohort", "invited": size, "cohort.size": said, "bit_exact": True}
            self.folder.log([{"round": record.index, **event}])
        self.invites |= record.asked_for

    def _watch(self, executor: Executor) -> None:
        """Enter what has happened to the workers."""
        with self.folder.writing():
            self.folder.log([{"round": self.at.index, **event} for event in executor.events])
        executor.events.clear()

    def _evaluate_again(self, executor: Executor) -> None:
        """Evaluate the round of the checkpoint, whose evaluation was under way."""
        evaluation = self._measure(executor, self.at.index - 1)
        result = self._result(evaluation, self.at.state, self.at.index)
        self._enter_each(self.at.index - 1, result)
        self.folder.tables.measured(result.metrics)
        self.unevaluated = False
        self._ask_early(self.told.evaluation(self.at.index, result.metrics))

    def _evaluate_clients(self, executor: Executor, index: int | None) -> ClientMetrics | None:
        """Evaluate clients on their own data, and enter that after round ``index``."""
        at = self.at
        result = self.x.evaluate_clients(executor, self._model(), at.state, at.index, at.memory.store)
        if result is not None and index is not None:
            with put_off(), self.folder.writing():
                self.folder.tables.add_each("clients", index, result.found, self.x.names.clients)
        return result

    def _settle(self) -> dict[str, float]:
        """Wait for the evaluation of the round that is held, and enter both."""
        if self.held is None:
            return {}
        record, evaluation = self.held
        result = self._result(evaluation, record.state, record.index + 1)
        self._enter(record, result)
        return result.metrics

    def _result(self, evaluation: _Evaluation, state: Any, rounds: int) -> Measured:
        """Wait for the evaluation of the state after so many rounds; write its model if no earlier one was as good."""
        result, domains, self.classes = evaluation.measurement.result()
        if (clients := evaluation.clients) is not None:
            by_domain = clients.by_domain(self.x.client_domains)
            result, domains = {**result, **clients.summary(), **summarised(by_domain)}, {**domains, **by_domain}
        result |= self.x.of_state(state)
        if self.x.algorithm.domains is not None:
            domains = {**self.x.algorithm.domains(state), **domains}
        metrics = {f"eval/{name}": value for name, value in result.items()}
        if self._is_best(metrics):
            last = bool(rounds % self.x.config.evaluation.every)
            self.folder.keep_best(self.x.algorithm.views["global"].params(state), rounds, provisional=last)
        return Measured(metrics, domains, self.classes)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Enter an evaluation, and say whether its model is the best by what models are selected by."""
        name = self.x.config.checkpoint.best
        name = next(iter(metrics), None) if name == "auto" else name
        self.stopping.note(metrics)
        better = improved(self.best, metrics)
        self.best |= better
        if name in better:
            self.selected = metrics
        return name in better

    def _enter_each(self, index: int, result: Measured) -> None:
        """Enter what was measured of every domain, and of every class."""
        if not (result.domains or result.classes):
            return
        with self.folder.writing():
            if result.domains:
                self.folder.tables.add_each("domains", index, result.domains, self.x.domain_names)
            if result.classes and (each := recalls(result.classes, self.x.examples.get("classes", 0))):
                self.folder.tables.add_each("recall", index, each, self.x.names.classes)

    def _enter(self, record: RoundRecord, result: Measured) -> None:
        metrics = result.metrics
        with put_off():
            self._enter_each(record.index, result)
            row = self.folder.add(record, metrics)
            self.held, self.unevaluated = None, False
        asked = self.told.round(row, [p.counts for p in record.phases])
        if metrics:
            of_evaluation = self.told.evaluation(record.index + 1, metrics)
            asked = self.stopping.patience() or asked or of_evaluation
        self._ask_early(asked)

    def _enter_all(self) -> None:
        """Enter the round whose evaluation has not come to its end, and the attempts at one that failed."""
        if self.last is not None and len(self.folder.tables) < self.at.index:
            self.folder.add(self.last, {})
        self.folder.tables.add_phases(self.at.index, self.aborted)

    def _save(self) -> None:
        account = {
            "initial": self.initial,
            "seconds": self._seconds(),
            "unevaluated": self.unevaluated,
            "evaluated": self.folder.tables.evaluated,
            "own": self.x.own,
            "data": self.x.fingerprint,
            "config": self._decisive,
            "scorer": self.scorer,
        }
        if self.initial is not None:
            with self.folder.writing():
                self.folder.tables.flush()
                path = self.folder.checkpoints.write(self.at, account | self.folder.account)
            self.told.checkpoint(self.at.index, path)
        self.saved = time.monotonic()

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _model(self) -> T.Tree:
        return model(self.x.algorithm, self.at.state)

    def _measure(self, executor: Executor, index: int | None) -> _Evaluation:
        measurement = Measurement(executor, self.x.task, self._model(), self.x.evaluation)
        return _Evaluation(measurement, self._evaluate_clients(executor, index))

    def _measure_last(self, executor: Executor) -> dict[str, float]:
        """Return the metrics of the last model on all test examples, where only some were evaluated on so far; keep its classes."""
        x, z = self.x, self._model()
        result = Measurement(executor, x.task, z, x.final).result()
        classes = result.classes or self.classes
        if classes is None and says_classes(x.task):  # this process went on with a run that had come to its end
            classes = Measurement(executor, x.task, z, {"test": x.evaluation["test"]}).result().classes
        if classes is not None:
            self.folder.keep_classes(self.at.index, classes, self.x.names.classes, self.x.domain_names)
        return {f"eval/{name}": value for name, value in result.metrics.items()}

    def _newest(self) -> Mapping[str, float]:
        """Return the last evaluation."""
        result = self.folder.tables.evaluations()
        return result[-1] if result else self.initial or {}

    def _net(self) -> dict[str, str]:
        """Return what a net made in Python is, in Python, if a line says it."""
        made = self.x.net_code if "task" in self.x.own else None
        return {} if made is None or len(made[1]) > LONGEST_NET else {"net": made[1]}

    def _summary(self, status: str, error: str | None) -> dict[str, Any]:
        x, rounds, clients = self.x, self.folder.tables.rows, self.x.population.summary()
        totals = ("floats_up", "floats_down", "bytes_up", "bytes_down")
        counted = (
            {"skipped_rounds": sum(row["skipped"] for row in rounds)} if x.config.cohort.on_abort == "skip" else {}
        )
        return {
            "status": status,
            "error": error,
            "stopped": self.stop and self.stop._asdict(),
            "diverged": self.stop.why if self.stop and self.stop.by == DIVERGED else None,
            "label": self.x.label,
            "own": self.x.own,
            **self._net(),
            "scorer": self.scorer,
            "domains": list(self.x.domain_names),
            "examples": self.x.examples,
            "dealt": self.x.dealt,
            "drawn": self.x.drawn,
            "rounds": len(rounds),
            **counted,
            "initial": self.initial or {},
            "final": {**self._newest(), **self.of_last},
            "best": self.best,
            "selected": self.selected,
            "median_seconds_per_round": statistics.median(row["seconds"] for row in rounds) if rounds else None,
            "seconds": self._seconds(),
            "model_floats": T.count(self._model()),
            "client_examples": {"least": clients.min_examples, "most": clients.max_examples},
            "local_steps": {name: n._asdict() for name, n in local_steps(x.algorithm, x.population).items()},
            "bit_exact": self.folder.bit_exact,
            "privacy": None,
            **{promise.key: promise.summary(self.at.state) for promise in x.promises},
            "secure_aggregation": secured.summary(x.config.secure_aggregation, x.algorithm, self.sums.first),
            **{name: sum(row[name] for row in rounds) for name in totals},
            "virtual_s": float(np.sum([row["virtual_s"] for row in rounds])),
        }


def describe(x: Prepared) -> str:
    """Say in one line what is run, and how."""
    return f"{named(x)}, {how(x)}"


def named(x: Prepared) -> str:
    """Say what is run: label, task, data, clients, parameters."""
    of = f"{x.config.task.name} on {x.config.population.dataset.name}"
    return f"{x.label}: {of}, {x.problem.clients:,} clients, {T.count(x.z):,} parameters"


def how(x: Prepared) -> str:
    """Say how clients work, where, and why there."""
    return f"{HOW[x.config.executor.inner]} {where(x)}"


def where(x: Prepared) -> str:
    """Say where clients work, and why there."""
    result, e = EXECUTORS[x.config.executor.kind].describe(x.config), x.config.executor
    if not x.chosen:
        return result
    if e.kind == "ray":
        if x.of_ray:
            return f"{result}, as options of Ray are given"
        if x.config.faults.client_timeout_s is not None:
            return f"{result}, as faults.client_timeout_s needs them"
        return f"{result}, as it is no small job (executor.kind=local: this process)"
    if e.device == "cuda":
        return f"{result}, which has the GPU"
    if (lacking := without_ray()) is not None:
        return f"{result}, as {lacking}"
    return f"{result}: quicker than on Ray"
