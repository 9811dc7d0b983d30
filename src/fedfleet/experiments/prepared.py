"""Put the parts together: data, clients, task, algorithm, executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fedfleet.config import participation, requirements, resolve, root, timing
from fedfleet.config import schema as C
from fedfleet.config.federation import federation, selection, steps
from fedfleet.config.made import places
from fedfleet.config.own_data import check_data, sampled
from fedfleet.config.population import (
    Data,
    check_clients,
    check_grouped,
    check_source_share,
    evaluation_data,
    final_data,
    load_data,
    make_population,
    parted,
    problem,
    with_digests,
    with_held_out,
    with_roles,
)
from fedfleet.config.schema import Config
from fedfleet.datasets.examples import Dataset
from fedfleet.experiments import learnt, own, weights
from fedfleet.experiments.executors import EXECUTORS
from fedfleet.experiments.gap import DomainLosses
from fedfleet.experiments.measures import check_libraries, metric_names, try_evaluation
from fedfleet.experiments.plane import plane
from fedfleet.experiments.provenance import differences, same
from fedfleet.experiments.tracked import check_callbacks
from fedfleet.experiments.vectors import Vectors
from fedfleet.middleware.attacks import wrap as attacks
from fedfleet.middleware.compression.wrap import receiving, sending
from fedfleet.middleware.cosines.watched import watched
from fedfleet.middleware.facts import check
from fedfleet.middleware.privacy.wrap import promised
from fedfleet.middleware.secure_aggregation.wrap import summed
from fedfleet.middleware.trial import Seen, tried
from fedfleet.simulator.algorithm import Algorithm, Personal, Task
from fedfleet.simulator.ambient import Gpu, fresh_settings
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup, phases_of
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.block.purity import Impure
from fedfleet.simulator.driver.client_metrics import (
    WEIGHT,
    ClientMetrics,
    client_metrics,
    client_phase,
    evaluate_clients,
    states,
)
from fedfleet.simulator.driver.evaluation import summarised
from fedfleet.simulator.driver.probe import asked, probe
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.server import initial
from fedfleet.simulator.driver.state import ClientStore
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.population import Population, gather
from fedfleet.simulator.registry import MadeInPython
from fedfleet.simulator.work import Batch

BESIDE = {"availability", "selection", "devices", "callbacks"}  # sections whose code has no part in clients' work


class Prepared:
    """A configuration made ready to run: data loaded, everything checked, every ``auto`` resolved.

    A task, an algorithm, a population or a data set of your own replaces the configured one, also in ``config``. A population
    brings the examples to test on, as its ``test``, or takes those of ``data``. ``loaded`` is the configured data set, if it has
    been read. Raises ConfigError or DataError.
    """

    @fresh_settings()
    def __init__(
        self,
        config: Config,
        *,
        task: Task | None = None,
        algorithm: Algorithm | None = None,
        population: Population | None = None,
        data: Data | None = None,
        loaded: Data | None = None,
    ):
        self._given = given = own.parts(task, algorithm, population, data)
        self._scorer: str | None = None
        resolve.check_early(config)
        own.check_unused(config, given)
        self._train = data.train if isinstance(data, Dataset) else None
        data, self.own = given.clients, given.describe()
        for section, (name, *_) in C.OWN.items():
            if name in self.own:
                config = C.replaced(config, section, MadeInPython(own=self.own[name]))
        data = data or loaded or load_data(config)
        config = with_digests(config, data)
        data, validation = parted(config, data)
        data, self.root = root.parted(config, data)
        if "data" not in self.own:
            self._train = data.train if isinstance(data, Dataset) else None
        self.task = task or learnt.configured(config, data)
        self.algorithm = algorithm or learnt.algorithm(config, self.task)
        self.written = {*self.own, *(here.section for here in places(config))}  # by the user
        config = learnt.with_sources(config)
        check_callbacks(config)
        config = learnt.with_base(config, self.task)
        resolve.check_pairing(config, self.algorithm, self.task)
        up, down = steps(config, "up"), steps(config, "down")
        broken = list(requirements.breaks(config, self.algorithm, self.task, up, down))
        check(requirements.needs(config, self.algorithm, up, down), broken)
        root.check(config, self.algorithm)
        self.dealt = isinstance(data, Dataset)  # by the partition, to clients that the data do not say
        dealt = make_population(config, data, lambda kind, clients: self._vectors(config)(kind, clients))
        if {"data", "population.dataset"} & self.written:
            part = next((p for p in ("population", "data") if getattr(given, p) is not None), "population.dataset")
            check_data(config, part, data, dealt)
        resolve.check_roles(config, self.algorithm, self.task)
        self.population = with_roles(config, data, dealt, unlabelled=resolve.unlabelled(self.algorithm, self.task))
        check_source_share(self.task, self.population)
        self.population = with_held_out(config, self.population, self.algorithm)
        self.problem = problem(self.population)
        summary = self.population.summary()
        self.z = self.task.init(config.seed)
        weights.check_vocabularies(config, data.names.vocabulary)
        self.net_advice = learnt.check(config, self.task, self.z, data)
        if "algorithm" in self.written:
            config = self._asked(config)
        config = check_clients(config, data, dealt, self.population, asynchronous=self.algorithm.asynchronous)
        if "algorithm" not in self.written:
            resolve.check_local(config, summary.max_examples)
        size = self.population.size
        as_data_say = config.domains.kind == "given"
        self.domain_names: tuple[str, ...] = getattr(data, "domains", ()) if as_data_say else ()
        if config.warm_start is not None:
            self.z = weights.load_model(Path(config.warm_start), self.z, self.task)
        resolve.check_proven(config, self.algorithm)
        if self.algorithm.domains is not None:
            check_grouped(f"algorithm={config.algorithm.name!r}", size)
            resolve.check_domains(config, data.test, summary.domains)
        initial(self.algorithm, self.z, config.seed, self.problem)  # what cannot be is said before the work
        if self._train is None and hasattr(self.task, "prepare"):
            raise ConfigError(
                f"population.dataset={config.population.dataset.name!r}: task.name={config.task.name!r} needs the "
                f"training images of a published data set: choose one"
            )
        self.evaluation, self.final = evaluation_data(config, data, validation), final_data(config, data)
        self.attack = attacks.placed(
            config.attack, self.task, size, config.seed, self.evaluation["test"], data.test.classes
        )
        if self.attack is not None:
            self.evaluation |= self.attack.splits(self.evaluation)
            self.final |= self.attack.splits(self.final)
        self.examples, self.names = weights.told(data, self.evaluation["test"]["y"]), data.names
        self.config = config
        root.check_work(self.algorithm, self.seen)
        about = requirements.context(config, self.task, self.problem, summary.max_examples, self.seen, broken)
        self.algorithm, self.promises = promised(config.privacy, config.example_privacy, self.algorithm, about)
        self.algorithm = sending(up, self.algorithm, about)
        self.algorithm = summed(config.secure_aggregation, self.algorithm, about)
        if self.attack is not None:
            self.algorithm = self.attack.on(self.algorithm)
        if config.evaluation.cosines:
            self.algorithm = watched(self.algorithm, summary.domains)
        self.algorithm = receiving(down, self.algorithm, about)
        check_libraries(self.task, self.z, {**self.evaluation, **self.final})
        resolve.check_metrics(config, self.metric_names)
        self.config = resolve.resolved(config, self.answers, len(self.algorithm.phases), self.z, lambda: self.notes)
        self.small = config.executor.kind == "auto" and self.config.executor.kind == "local"
        self.federation = federation(self.config, self.population)
        self.participation_advice = participation.advice(self.config, self.algorithm, self.federation, self.population)
        self.selection = selection(self.config, self.problem)
        self.costs = timing.costs(self.config, self.algorithm, self.z, lambda: self.notes)
        timing.check_deadline(self.config, self.federation, self.algorithm, self.population, self.costs)
        self._made_of = given.describe()  # once more: what was computed here may be kept there

    def _vectors(self, config: Config) -> Vectors:
        """Return what clients make of the model they are grouped by, which is the same for runs of every seed."""
        z = self.task.init(config.population.partition_seed)
        return Vectors(
            self.task, z if config.warm_start is None else weights.load_model(Path(config.warm_start), z, self.task)
        )

    def _asked(self, config: Config) -> Config:
        """Return the configuration with the cohort that one's own algorithm invites. Raises ConfigError where it says another."""
        wanted, size = config.cohort.invite, asked(self.algorithm, self.z, self.problem, config.seed)
        if self.algorithm.asynchronous or size in (None, wanted):
            return config
        if "invite" in config.cohort.model_fields_set:
            raise ConfigError(
                f"cohort.invite={wanted}: the algorithm {config.algorithm.name} invites {size} clients: set "
                f"cohort.invite={size}, leave it out, or make the algorithm so that it invites {wanted}"
            )
        return config.model_copy(update={"cohort": config.cohort.model_copy(update={"invite": size})})

    def seen(self, algorithm: Algorithm) -> Seen:
        """Try an algorithm on very little, to see what its clients send."""
        setup = replace(self.setup(), phases=phases_of(algorithm))
        return tried(algorithm, self.z, self.problem, setup)

    @property
    def label(self) -> str:
        """Return the run's name in reports."""
        return self.config.label or self.config.algorithm.name

    def prepare(self, say: Callable[[str], None]) -> str | None:
        """Let the task make ready, once, what it measures with; return what that is. Raises ConfigError."""
        if self._scorer is None:
            self._scorer = self._made_ready(say)
        return self._scorer

    def _made_ready(self, say: Callable[[str], None]) -> str | None:
        ready = getattr(self.task, "prepare", None)
        if ready is None or self._train is None:
            return None
        try:
            return ready(self._train.x, self._train.y, say)
        except (OSError, SafetensorError, ValueError) as e:
            raise ConfigError(one_line(e)) from None

    def images(self, z: Tree) -> torch.Tensor | None:
        """Return images (n, c, h, w) that a model generates, where the task is to generate any."""
        draw = getattr(self.task, "images", None)
        if draw is None:
            return None
        with torch.no_grad():
            return draw(z)

    def plane(self, z: Tree) -> dict[str, torch.Tensor] | None:
        """Return what a model says of the plane, where examples are points of it."""
        return plane(self.task, z, self.evaluation["test"])

    def metric_names(self) -> list[str]:
        """Return what an evaluation measures, as ``eval/<metric>``."""
        found = metric_names(self.task, self.z, self.evaluation)
        if self.config.evaluation.per_client:
            none = torch.zeros(self.problem.clients)
            known = ClientMetrics(none + 1, dict.fromkeys(client_metrics(self._client_metrics(), self.personal), none))
            found += [f"eval/{m}" for m in {**known.summary(), **summarised(known.by_domain(self.client_domains))}]
        found += ["eval/duality_gap"] * self.config.evaluation.duality_gap
        return found + [f"eval/{promise.column}" for promise in self.promises]

    def final_names(self) -> list[str]:
        """Return what is measured at the end: what an evaluation measures, and the same on all test examples."""
        return self.metric_names() + metric_names(self.task, self.z, self.final)

    @cached_property
    def _losses(self) -> DomainLosses:
        return DomainLosses(self.task, self.population)

    def of_state(self, state: Any) -> dict[str, float]:
        """Return what is measured of an algorithm's state itself: the duality gap, the privacy that is spent, where asked for."""
        found = {promise.column: promise.epsilon(state) for promise in self.promises}
        if self.config.evaluation.duality_gap and self.algorithm.saddle is not None:
            found["duality_gap"] = self._losses.gap(self.algorithm.saddle(state, self.problem))
        return found

    @property
    def client_domains(self) -> torch.Tensor:
        """Return the domain of every client (N,)."""
        return self.population.domains(torch.arange(self.problem.clients))

    @property
    def personal(self) -> Personal | None:
        """Return how clients' own models come about that are to be measured: where examples are held out for that."""
        return self.algorithm.personal if self.config.population.held_out else None

    @property
    def answers(self) -> int:
        """Return how many clients a phase trains at most, but for late answers."""
        wanted = self.config.cohort.invite
        return getattr(self.config.algorithm, "buffer", wanted) if self.algorithm.asynchronous else wanted

    def try_out(self) -> None:
        """Try client code and evaluation on very little, before anything is written.

        Raises Impure, and ConfigError where what was made in Python has changed since this was made of it.
        """
        now = self._given.describe()
        for part, was in self._made_of.items():
            if not same(was, now[part]):
                before, here = differences(was, now[part])
                raise ConfigError(
                    f"{part} {was['name']}: it was changed ({before}, now {here}) after this Experiment was made of it: make "
                    f"another Experiment"
                )
        with torch.random.fork_rng(devices=[]):
            if self.written - BESIDE:  # what comes with fedfleet is known to be pure, and a large net takes its time
                _ = self.notes
            if not getattr(self.task, "whole", False):
                functions = ["per_example"] * self.config.evaluation.per_client + ["predict"]
                try_evaluation(self.task, replace(self.setup(), device="cpu"), self.z, functions)

    @property
    def found(self) -> Notes | None:
        """Return what a trial has taught; None where nothing asked for one."""
        return vars(self).get("notes")

    @cached_property
    def notes(self) -> Notes:
        """Learn what factoring and the phases take; where client code does not run, the run itself will say so. Raises Impure."""
        try:
            return probe(self.algorithm, self.z, self.problem, self.setup(), own="algorithm" in self.written)
        except Impure:
            raise
        except FedfleetError:
            return Notes()

    def setup(self) -> Setup:
        """Return what workers need."""
        e, timeout = self.config.executor, self.config.faults.client_timeout_s  # capturing takes its time
        made = Setup.of(
            self.algorithm,
            self.task,
            self.population if self.attack is None else self.attack.clients(self.population),
            e.inner,
            evaluation={**self.evaluation, **self.final},
            device=e.device,
            gpu=Gpu(e.deterministic, e.tf32),
            reads=own.read_by_workers,
            root=self.root,
            captures=Captures(compiles=e.capture == "compiled")
            if e.capture and timeout is None
            else Captures(after=None),
        )
        if not self.config.evaluation.per_client:
            return made
        held_out = self.config.population.held_out > 0
        measure = client_phase(self._client_metrics(), held_out=held_out, personal=self.personal)
        return replace(made, phases={**made.phases, measure.name: measure})

    def _client_metrics(self) -> tuple[str, ...]:
        """Ask the task for the names by evaluating one example. Raises ConfigError."""
        if "per_example" not in self.task.functions:
            raise ConfigError(
                f"evaluation.per_client=True: the task {self.config.task.name} has no function 'per_example', metrics (B,) "
                f"of a batch by name: give it one, or set it to false"
            )
        row = gather(self.evaluation["test"], torch.zeros(1, dtype=torch.int64))
        found = self.task.functions["per_example"](self.z, Batch(row, torch.ones(1)))
        return tuple(name for name in found if name != WEIGHT)

    def evaluate_clients(
        self, executor: Executor, z: Tree, state: Any, rounds: int, store: ClientStore
    ) -> ClientMetrics | None:
        """Return every client's metrics at the model ``z`` of a state after so many rounds, where they are evaluated."""
        if not self.config.evaluation.per_client:
            return None
        given: dict[str, Any] = {}
        if self.personal is not None:
            message = self.personal.message(state, max(rounds - 1, 0))
            given = {"message": message, "own": states(store, self.personal, message)}
        return evaluate_clients(executor, z, self.problem.clients, seed=self.config.seed, **given)

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
            skip_void=c.void == "skip",
            stale_discount=c.stale_discount if c.late == "keep" else None,
            train_all=self.config.executor.train_all,
            over_select=c.over_select,
            block_size=int(self.config.executor.block_size),
            faults=Faults(**self.config.faults.model_dump()),
            bytes_up=self.costs.bytes_up,
            flop=self.costs.flop,
            device=torch.device("cuda") if self.config.executor.device == "cuda" and resolve.gpus() else None,
        )

    @property
    def asked_of_executor(self) -> tuple[Any, ...]:
        """Return the kind of the configured executor, and what one is made of."""
        kind = self.config.executor.kind
        return kind, *EXECUTORS[kind].asked(self.config)

    def executor(self) -> Executor:
        """Return the configured executor, not yet started."""
        kind, *asked = self.asked_of_executor
        return EXECUTORS[kind].build(*asked)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the population's numbers, of what a few clients hold and of the data that models are tested on."""
        few = {f"local {name}": column for name, column in sampled(self.population).items()}
        return digest(f"{self.problem.clients} {self.population.summary()}", {**self.evaluation["test"], **few})
