"""Put the parts together: data, clients, task, algorithm, executor; run; write the run folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fedfleet import config as C
from fedfleet import resolve
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config import Config
from fedfleet.datasets import registry as datasets
from fedfleet.datasets.examples import Dataset
from fedfleet.datasets.files import DataError, data_dir
from fedfleet.progress import Progress
from fedfleet.runfolder import RunFolder, claim, load_model
from fedfleet.simulator import rng
from fedfleet.simulator import tree as T
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.availability import (
    Always,
    Availability,
    Bernoulli,
    First,
    ResponsePolicy,
    ResponseTime,
    Siwer,
    WaitAll,
)
from fedfleet.simulator.block import Setup
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.evaluation import client_phase, evaluate, evaluate_clients
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import InMemoryPopulation, Population
from fedfleet.simulator.round import Conditions
from fedfleet.simulator.simulate import RoundRecord, simulate
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

    A task, an algorithm or a population of your own replaces the configured one. Raises ConfigError or DataError.
    """

    def __init__(
        self,
        config: Config,
        *,
        task: Task | None = None,
        algorithm: Algorithm | None = None,
        population: Population | None = None,
    ):
        resolve.check_early(config)
        data = datasets.load(config.population.dataset, data_dir(config.population.data_dir))
        self.task = task or _task(config, data)
        self.algorithm = algorithm or ALGORITHMS[config.algorithm["name"]].build(
            C.options(config, "algorithm"), self.task, config.cohort
        )
        resolve.check_pairing(config, self.algorithm, self.task)
        self.population = population or _population(config, data)
        ids = torch.arange(self.population.size)
        sizes = self.population.num_examples(ids)
        if int(sizes.min()) == 0:
            raise ConfigError(
                f"population.partition: client {int(sizes.argmin())} has no examples: raise partition.min_size, or lower "
                f"population.clients"
            )
        if algorithm is None:
            resolve.check_batch(config, int(sizes.max()))
        self.problem = Problem(self.population.size, float(sizes.double().mean()))
        self.z = self.task.init(config.seed)
        if config.warm_start is not None:
            self.z = load_model(Path(config.warm_start), self.z)
        self.config = resolve.resolved(config, T.count(self.z))
        self.evaluation = _evaluation(config, data)

    @property
    def label(self) -> str:
        """Return the run's name in reports."""
        return self.config.label or self.config.algorithm["name"]

    def setup(self) -> Setup:
        """Return what workers need."""
        phases = {p.name: p for p in self.algorithm.phases}
        if self.config.evaluation.per_client:
            phases["client_metrics"] = client_phase(self._client_metrics())
        e = self.config.executor
        return Setup(
            population=self.population,
            phases=phases,
            objectives=self.task.objectives,
            functions=self.task.functions,
            evaluation=self.evaluation,
            inner=e.inner,
            device=e.device,
        )

    def _client_metrics(self) -> tuple[str, ...]:
        """Ask the task for the names by evaluating one example."""
        from fedfleet.simulator.population import gather
        from fedfleet.simulator.work import Batch

        row = gather(self.evaluation["test"], torch.zeros(1, dtype=torch.int64))
        return tuple(self.task.functions["per_example"](self.z, Batch(row, torch.ones(1))))

    def conditions(self) -> Conditions:
        """Return how the federation behaves."""
        c = self.config.cohort
        chosen = C.options(self.config, "availability")
        availability: Availability = Bernoulli(chosen.rate) if isinstance(chosen, C.Bernoulli) else Always()
        policy: ResponsePolicy = WaitAll()
        if c.respond == "siwer":
            policy = Siwer(c.response_low, c.response_high)
        elif isinstance(c.respond, int):
            policy = First(c.respond)
        return Conditions(
            seed=self.config.seed,
            availability=availability,
            times=ResponseTime(self.config.devices.median_s, self.config.devices.sigma),
            policy=policy,
            shared_response_count=c.shared_response_count,
            min_responses=c.min_responses,
            block_size=resolve.block_size(self.config),
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

        An interruption (KeyboardInterrupt) or an error still leaves the tables, the model and a summary with the status.
        """
        folder = RunFolder(claim(out), self.config.model_dump())
        with torch.random.fork_rng(devices=[]):
            return _Runner(self, folder, progress or Progress.silent()).run()


class _Runner:
    """One run under way."""

    def __init__(self, experiment: Experiment, folder: RunFolder, progress: Progress):
        self.x, self.folder, self.progress = experiment, folder, progress
        self.z = experiment.z
        self.initial: dict[str, float] = {}
        self.final: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.seconds: list[float] = []
        self.done = 0
        self.started = time.monotonic()

    def run(self) -> Run:
        executor = self.x.executor()
        status, error = "finished", None
        try:
            self.progress.say(f"starting: {_describe(self.x)}")
            executor.start(self.x.setup())
            status = self._rounds(executor)
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except FedfleetError as e:
            status, error = "failed", str(e)
            raise
        except BaseException as e:
            status, error = "failed", f"{type(e).__name__}: {e}"
            raise
        finally:
            executor.close()
            self.progress.close()
            summary = self._summary(status, error)
            self.folder.finish(self.z, summary)
        return Run(self.folder.folder, summary)

    def _rounds(self, executor: Executor) -> str:
        config = self.x.config
        until = resolve.parse_until(config.until) if config.until else None
        self.initial = self.final = evaluate(executor, self.x.task, self.z, self.x.evaluation)
        self._keep_best(self.initial)
        status = "finished"
        for record in simulate(self.x.algorithm, self.z, self.x.problem, self.x.conditions(), executor, config.rounds):
            self.z = self.x.algorithm.views["global"].params(record.state)
            self.seconds.append(record.seconds)
            out_of_time = config.max_seconds is not None and time.monotonic() - self.started > config.max_seconds
            metrics = self._evaluate(executor, record, out_of_time)
            row = self.folder.add(record, metrics)
            self.done += 1
            self.progress.round(row, config.rounds)
            if out_of_time or (until and _reached(row, *until)):
                status = "stopped"
                break
        return status

    def _evaluate(self, executor: Executor, record: RoundRecord, last: bool) -> dict[str, float]:
        every, rounds = self.x.config.evaluation.every, self.x.config.rounds
        if (record.index + 1) % every and record.index + 1 != rounds and not last:
            return {}
        metrics = evaluate(executor, self.x.task, self.z, self.x.evaluation)
        self.final = metrics
        self._keep_best(metrics)
        if self.x.config.evaluation.per_client:
            found = evaluate_clients(executor, self.z, self.x.problem.clients)
            self.folder.add_clients(record.index, torch.arange(self.x.problem.clients), found)
        return metrics

    def _keep_best(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            better = min if "loss" in name else max
            self.best[name] = better(self.best.get(name, value), value)

    def _summary(self, status: str, error: str | None) -> dict[str, Any]:
        rounds = self.folder.rounds()
        totals = {
            k: sum(rounds[k].tolist()) for k in ("floats_up", "floats_down", "bytes_up", "bytes_down", "virtual_s")
        }
        return {
            "status": status,
            "error": error,
            "label": self.x.label,
            "rounds": self.done,
            "initial": {f"eval/{k}": v for k, v in self.initial.items()},
            "final": {f"eval/{k}": v for k, v in self.final.items()},
            "best": {f"eval/{k}": v for k, v in self.best.items()},
            "median_seconds_per_round": statistics.median(self.seconds) if self.seconds else None,
            "seconds": time.monotonic() - self.started,
            "model_floats": T.count(self.z),
            "bit_exact": True,
            **totals,
        }


def _reached(row: Mapping[str, Any], metric: str, at_least: bool, value: float) -> bool:
    found = row.get(metric)
    return found is not None and (found >= value if at_least else found <= value)


def _describe(x: Experiment) -> str:
    e = x.config.executor
    where = f"{resolve.actors(x.config)} Ray actors" if e.kind == "ray" else "this process"
    return (
        f"{x.label} on {x.config.task['name']}, {x.config.population.dataset}, {x.problem.clients:,} clients, "
        f"{T.count(x.z):,} floats, {e.inner} on {where}"
    )


def _task(config: Config, data: Dataset) -> Task:
    shape = DataShape(tuple(data.train.x.shape[1:]), data.train.classes)
    try:
        return TASKS[config.task["name"]].build(C.options(config, "task"), shape)
    except ValueError as e:
        raise ConfigError(f"task: {e}" if not str(e).startswith("task.") else str(e)) from None


def _population(config: Config, data: Dataset) -> Population:
    p = config.population
    try:
        partition = C.options(config, "population.partition").split(
            labels=data.train.y, domains=data.train.domain, clients=p.clients, seed=p.partition_seed
        )
    except DataError:
        raise
    except ValueError as e:
        raise ConfigError(f"population.partition={p.partition['kind']}, population.clients={p.clients}: {e}") from None
    domain = torch.zeros(p.clients, dtype=torch.int64)
    if data.train.domain is not None:
        domain = data.train.domain[partition.indices[partition.offsets[:-1]]]
    return InMemoryPopulation({"x": data.train.x, "y": data.train.y}, partition.indices, partition.offsets, domain)


def _evaluation(config: Config, data: Dataset) -> dict[str, dict[str, torch.Tensor]]:
    splits = {"test": {"x": data.test.x, "y": data.test.y}}
    wanted = min(config.evaluation.train_examples, len(data.train))
    if wanted:
        rows = rng.sample(rng.fold(rng.key(0), "evaluation"), len(data.train), wanted).sort().values
        splits["train"] = {"x": data.train.x[rows], "y": data.train.y[rows]}
    return splits
