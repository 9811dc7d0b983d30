"""Put the parts together: data, clients, task, algorithm, executor; run; write the run folder."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from fedfleet import config as C
from fedfleet import resolve, rules, timing
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config import Config
from fedfleet.federation import federation, selection
from fedfleet.population import Data, check_clients, evaluation_data, load_data, make_population
from fedfleet.progress import Progress
from fedfleet.runfolder import RunFolder, check_free, claim, load_model
from fedfleet.simulator import tree as T
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.block import Setup
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.evaluation import Measurement, client_phase, evaluate_clients
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.factored import Notes
from fedfleet.simulator.faults import Faults
from fedfleet.simulator.population import Population, gather
from fedfleet.simulator.probe import probe
from fedfleet.simulator.round import Conditions
from fedfleet.simulator.simulate import RoundRecord, simulate
from fedfleet.simulator.tree import Tree
from fedfleet.simulator.work import Batch
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its summary, its tables."""

    folder: Path
    summary: Mapping[str, Any]

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the run folder: "rounds", "phases", "fates" or "clients"."""
        return pd.read_parquet(self.folder / f"{name}.parquet")

    @property
    def rounds(self) -> pd.DataFrame:
        """Return ``rounds.parquet``."""
        return self.table("rounds")


class Experiment:
    """A configuration made ready to run: data loaded, everything checked, every ``auto`` resolved.

    A task, an algorithm, a population or a data set of your own replaces the configured one. Raises ConfigError or DataError.
    """

    def __init__(
        self,
        config: Config,
        *,
        task: Task | None = None,
        algorithm: Algorithm | None = None,
        population: Population | None = None,
        data: Data | None = None,
    ):
        resolve.check_early(config)
        data = data or load_data(config)
        self.task = task or _task(config, data)
        self.algorithm = algorithm or ALGORITHMS[C.named(config, "algorithm")].build(
            C.options(config, "algorithm"), self.task, config.cohort
        )
        resolve.check_pairing(config, self.algorithm, self.task)
        self.population = population or make_population(config, data)
        config = check_clients(config, self.population, asynchronous=self.algorithm.asynchronous)
        summary = self.population.summary()
        if algorithm is None:
            resolve.check_local(config, summary.max_examples)
        self.problem = Problem(self.population.size, summary.mean_examples, self.population.num_examples)
        self.z = self.task.init(config.seed)
        if config.warm_start is not None:
            self.z = load_model(Path(config.warm_start), self.z)
        self.evaluation = evaluation_data(config, data)
        if config.until is not None:
            resolve.check_until(config, self.metric_names())
        self.config = config
        self.config = resolve.resolved(config, self._inner(), self._block_size())
        self.federation = federation(self.config, self.population)
        self.selection = selection(self.config)
        self.costs = timing.costs(self.config, self.algorithm, self.z, lambda: self.notes)
        timing.check_deadline(self.config, self.federation, self.algorithm, self.population, self.costs)

    @property
    def label(self) -> str:
        """Return the run's name in reports."""
        return self.config.label or C.named(self.config, "algorithm")

    def metric_names(self) -> list[str]:
        """Return what an evaluation measures, as ``eval/<metric>``."""
        return _metric_names(self.task, self.z, self.evaluation)

    @property
    def answers(self) -> int:
        """Return how many clients a phase trains at most, but for late answers."""
        wanted = self.config.cohort.invite
        return getattr(C.options(self.config, "algorithm"), "buffer", wanted) if self.algorithm.asynchronous else wanted

    def _inner(self) -> str:
        e = self.config.executor
        return rules.inner(self.z, self.notes, resolve.device(self.config)) if e.inner == "auto" else e.inner

    def _block_size(self) -> int:
        size = self.config.executor.block_size
        return rules.block_size(self.answers, self.z, self.notes) if size == "auto" else size

    @cached_property
    def notes(self) -> Notes:
        """Learn what factoring and the phases take; where client code does not run, the run itself will say so."""
        with contextlib.suppress(FedfleetError):
            return probe(self.algorithm, self.z, self.problem, self.setup())
        return Notes()

    def setup(self) -> Setup:
        """Return what workers need."""
        e = self.config.executor
        made = Setup.of(
            self.algorithm, self.task, self.population, e.inner, evaluation=self.evaluation, device=e.device
        )
        if not self.config.evaluation.per_client:
            return made
        measure = client_phase(self._client_metrics())
        return replace(made, phases={**made.phases, measure.name: measure})

    def _client_metrics(self) -> tuple[str, ...]:
        """Ask the task for the names by evaluating one example."""
        row = gather(self.evaluation["test"], torch.zeros(1, dtype=torch.int64))
        return tuple(self.task.functions["per_example"](self.z, Batch(row, torch.ones(1))))

    def conditions(self) -> Conditions:
        """Return how the federation behaves."""
        c = self.config.cohort
        return Conditions(
            seed=self.config.seed,
            federation=self.federation,
            selection=self.selection,
            shared_response_count=c.shared_response_count,
            min_responses=c.min_responses,
            attempts=c.attempts,
            retry_s=c.retry_s,
            stale_discount=c.stale_discount if c.late == "keep" else None,
            train_all=self.config.executor.train_all,
            over_select=c.over_select,
            block_size=int(self.config.executor.block_size),
            faults=Faults(**self.config.faults.model_dump()),
            bytes_up=self.costs.bytes_up,
            flop=self.costs.flop,
        )

    def executor(self) -> Executor:
        """Return the configured executor, not yet started."""
        e = self.config.executor
        if e.kind == "local":
            return LocalExecutor(e.threads_per_actor)
        from fedfleet.simulator.executors.ray import RayExecutor  # importing Ray takes a second

        return RayExecutor(
            resolve.actors(self.config),
            e.cpus_per_actor,
            e.gpus_per_actor,
            e.threads_per_actor,
            e.address,
            resolve.cpus(),
        )

    def run(self, out: Path, progress: Progress | None = None) -> Run:
        """Run to the end and write the run folder ``out``, which must be new.

        An interruption (KeyboardInterrupt, SystemExit) or an error still leaves the tables, the model and a summary with the
        status.
        """
        check_free(out)
        with torch.random.fork_rng(devices=[]), closing(self.executor()) as executor:
            folder = RunFolder(claim(out), C.complete(self.config))
            return _Runner(self, folder, progress or Progress.silent()).run(executor)


class _Held(NamedTuple):
    """A round whose evaluation is under way."""

    record: RoundRecord
    measurement: Measurement


class _Runner:
    """One run under way. A round is evaluated while the next one runs, and enters the tables after that."""

    def __init__(self, experiment: Experiment, folder: RunFolder, progress: Progress):
        self.x, self.folder, self.progress = experiment, folder, progress
        self.z = experiment.z
        self.initial: dict[str, float] = {}
        self.final: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.seconds: list[float] = []
        self.held: _Held | None = None
        self.round = 0
        self.started = time.monotonic()

    def run(self, executor: Executor) -> Run:
        status, error = "failed", None
        try:
            self.progress.say(f"starting: {describe(self.x)}")
            executor.start(self.x.setup())
            status = self._rounds(executor)
        except (KeyboardInterrupt, SystemExit):
            status = "interrupted"
            raise
        except FedfleetError as e:
            error = str(e)
            raise
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            self._watch(executor)
            if self.held is not None:
                self.folder.add(self.held.record, {})
            self.progress.close()
            summary = self._summary(status, error)
            self.folder.finish(self.z, summary)
        return Run(self.folder.folder, summary)

    def _rounds(self, executor: Executor) -> str:
        config = self.x.config
        self.initial = self._metrics(self._measure(executor))
        self.folder.metrics = tuple(self.initial)
        self.progress.initial(self.initial)
        if self._reached(self.initial):
            return "stopped"
        for record in simulate(self.x.algorithm, self.z, self.x.problem, self.x.conditions(), executor, config.rounds):
            self._settle()
            self._watch(executor)
            self.round = record.index + 1
            self.z = self.x.algorithm.views["global"].params(record.state)
            self.seconds.append(record.seconds)
            out_of_time = config.max_seconds is not None and time.monotonic() - self.started > config.max_seconds
            last = out_of_time or record.index + 1 == config.rounds
            if (record.index + 1) % config.evaluation.every and not last:
                self._add(record, {})
                continue
            self.held = _Held(record, self._measure(executor))
            if config.evaluation.per_client:
                found = evaluate_clients(executor, self.z, self.x.problem.clients)
                self.folder.add_clients(record.index, torch.arange(self.x.problem.clients), found)
            if (last or config.until is not None) and (self._reached(self._settle()) or out_of_time):
                return "stopped"
        return "finished"

    def _watch(self, executor: Executor) -> None:
        """Enter what has happened to the workers."""
        self.folder.log([{"round": self.round, **event} for event in executor.events])
        executor.events.clear()

    def _settle(self) -> dict[str, float]:
        """Wait for the evaluation of the round that is held, and enter both."""
        if self.held is None:
            return {}
        record, measurement = self.held
        metrics = self._metrics(measurement)
        self.held = None
        self._add(record, metrics)
        return metrics

    def _add(self, record: RoundRecord, metrics: Mapping[str, float]) -> None:
        self.progress.round(self.folder.add(record, metrics), self.x.config.rounds)

    def _reached(self, metrics: Mapping[str, float]) -> bool:
        if self.x.config.until is None:
            return False
        metric, at_least, value = resolve.parse_until(self.x.config.until)
        found = metrics.get(metric)
        return found is not None and (found >= value if at_least else found <= value)

    def _measure(self, executor: Executor) -> Measurement:
        return Measurement(executor, self.x.task, self.z, self.x.evaluation)

    def _metrics(self, measurement: Measurement) -> dict[str, float]:
        """Return ``eval/<metric>`` -> value."""
        self.final = {f"eval/{name}": value for name, value in measurement.result().items()}
        for name, value in self.final.items():
            better = min if "loss" in name else max
            if math.isfinite(value):
                self.best[name] = better(self.best.get(name, value), value)
        return self.final

    def _summary(self, status: str, error: str | None) -> dict[str, Any]:
        rounds = self.folder.rounds()
        totals = ("floats_up", "floats_down", "bytes_up", "bytes_down", "virtual_s")
        return {
            "status": status,
            "error": error,
            "label": self.x.label,
            "rounds": len(rounds),
            "initial": self.initial,
            "final": self.final,
            "best": self.best,
            "median_seconds_per_round": statistics.median(self.seconds) if self.seconds else None,
            "seconds": time.monotonic() - self.started,
            "model_floats": T.count(self.z),
            "bit_exact": self.folder.events == 0,
            **{name: rounds[name].sum().item() for name in totals},
        }


def describe(x: Experiment) -> str:
    """Say in one line what is run, and on what."""
    e = x.config.executor
    where = f"{resolve.actors(x.config)} Ray actors" if e.kind == "ray" else "this process"
    return (
        f"{x.label} on {C.named(x.config, 'task')}, {C.named(x.config, 'population.dataset')}, {x.problem.clients:,} clients, "
        f"{T.count(x.z):,} floats, {e.inner} on {where}"
    )


def _task(config: Config, data: Data) -> Task:
    shape = DataShape(tuple(data.test.x.shape[1:]), data.test.classes)
    chosen, build = C.options(config, "task"), TASKS[C.named(config, "task")].build
    try:
        with torch.device("meta"):  # count the floats before any memory is taken
            floats = T.count(build(chosen, shape).init(config.seed))
    except (ValueError, RuntimeError) as e:
        key = "" if str(e).startswith("task.") else f"task.model={getattr(chosen, 'model', None)!r}: "
        raise ConfigError(f"{key}{one_line(e)}") from None
    resolve.check_model(config, floats)
    return build(chosen, shape)


def _metric_names(task: Task, z: Tree, splits: Mapping[str, Mapping[str, torch.Tensor]]) -> list[str]:
    """Ask the task for ``eval/<metric>`` names by evaluating a few examples."""
    found = []
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # a few examples may hold one class only
        for split, tensors in splits.items():
            few = gather(tensors, torch.arange(min(100, len(tensors["y"]))))
            outputs = task.functions["predict"](z, Batch(few, torch.ones(len(few["y"]))))
            prefix = "" if split == "test" else f"{split}_"
            found += [f"eval/{prefix}{name}" for name in task.metrics(outputs, few)]
    return found
