"""The third stage: the algorithm with all that stands between it and the engine, and what it is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fedfleet.algorithms.lasting import persists
from fedfleet.assembly import user_parts, weights
from fedfleet.assembly.data import so_far
from fedfleet.assembly.federation import Federated
from fedfleet.assembly.measures import check_libraries, metric_names
from fedfleet.config import requirements, resolve, root
from fedfleet.config.population import evaluation_data, final_data
from fedfleet.config.schema import Config
from fedfleet.middleware.attacks.wrap import Attacking, placed
from fedfleet.middleware.compression.options import Step
from fedfleet.middleware.compression.wrap import receiving, sending
from fedfleet.middleware.context import Context
from fedfleet.middleware.cosines.watched import watched
from fedfleet.middleware.facts import Fact, Need, check, of_trial
from fedfleet.middleware.privacy.wrap import Promise, promised
from fedfleet.middleware.secure_aggregation.wrap import summed
from fedfleet.middleware.trial import Seen, tried
from fedfleet.simulator.algorithm import Algorithm, Personal
from fedfleet.simulator.ambient import Gpu
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.side_effects import ClosureTensors, Impure
from fedfleet.simulator.driver.client_metrics import WEIGHT, ClientMetrics, client_metrics, client_phase
from fedfleet.simulator.driver.evaluation import summarised
from fedfleet.simulator.driver.probe import probe
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.population import gather
from fedfleet.simulator.work import Batch

Splits = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Assembled(Federated):
    """An algorithm as it runs.

    Attributes:
        evaluation, final: splits of examples that models are evaluated on, and those for the last model alone.
        attack: who attacks, and how; None where nobody does.
        algorithm: the algorithm, wrapped.
        promises: of privacy, in the order in which they are kept.
        examples: what is to be known of the examples by whoever reads a model.

    """

    evaluation: Splits
    final: Splits
    attack: Attacking | None
    algorithm: Algorithm
    promises: tuple[Promise, ...]
    examples: dict[str, Any]

    @property
    def names(self) -> Any:
        """The data's names of clients, classes and features."""
        return self.data.names

    @property
    def personal(self) -> Personal | None:
        """Clients' own models that are to be measured, where examples are held out for that."""
        return self.algorithm.personal if self.config.population.held_out else None

    @property
    def answers(self) -> int:
        """Clients that a phase trains at most, but for late answers."""
        buffer = self.algorithm.asynchronous
        return self.config.cohort.size if buffer is None else buffer.answers(self.problem.clients)

    @property
    def client_domains(self) -> Tensor:
        """The domain of every client (N,)."""
        return self.population.domains(torch.arange(self.problem.clients))

    @cached_property
    def notes(self) -> Notes:
        """Notes on factoring and on the phases' costs; where client code does not run, the run will say so. Raises Impure."""
        try:
            return probe(self.algorithm, self.z, self.problem, self.setup(), own="algorithm" in self.written)
        except Impure:
            raise
        except FedfleetError:
            return Notes()

    def seen(self, algorithm: Algorithm) -> Seen:
        """Try an algorithm on very little, to see what its clients send."""
        return _seen(self, self.evaluation, self.final, self.attack, algorithm)

    def setup(self) -> Setup:
        """Return what workers need."""
        made = _setup(self, self.evaluation, self.final, self.attack, self.algorithm)
        if not self.config.evaluation.per_client:
            return made
        held_out = self.config.population.held_out > 0
        measure = client_phase(self._client_metrics(), held_out=held_out, personal=self.personal)
        return replace(made, phases={**made.phases, measure.name: measure})

    def metric_names(self) -> list[str]:
        """Return what an evaluation measures, as ``eval/<metric>``."""
        result = metric_names(self.task, self.z, self.evaluation)
        if self.config.evaluation.per_client:
            none = torch.zeros(self.problem.clients)
            known = ClientMetrics(none + 1, dict.fromkeys(client_metrics(self._client_metrics(), self.personal), none))
            result += [f"eval/{m}" for m in {**known.summary(), **summarised(known.by_domain(self.client_domains))}]
        result += ["eval/duality_gap"] * self.config.evaluation.duality_gap
        return result + [f"eval/{promise.column}" for promise in self.promises]

    def final_names(self) -> list[str]:
        """Return what is measured at the end: what an evaluation measures, and the same on all test examples."""
        return self.metric_names() + metric_names(self.task, self.z, self.final)

    def _client_metrics(self) -> tuple[str, ...]:
        """Ask the task for the names by evaluating one example. Raises ConfigError."""
        if "per_example" not in self.task.functions:
            raise ConfigError(
                f"evaluation.per_client=True: the task {self.config.task.name} has no function 'per_example', metrics (B,) "
                f"of a batch by name: give it one, or set it to false"
            )
        row = gather(self.evaluation["test"], torch.zeros(1, dtype=torch.int64))
        result = self.task.functions["per_example"](self.z, Batch(row, torch.ones(1)))
        return tuple(name for name in result if name != WEIGHT)


def _setup(x: Federated, evaluation: Splits, final: Splits, attack: Attacking | None, algorithm: Algorithm) -> Setup:
    """Return what workers need for an algorithm."""
    e, timeout = x.config.executor, x.config.faults.client_timeout_s  # capturing takes its time
    return Setup.of(
        algorithm,
        x.task,
        x.population if attack is None else attack.clients(x.population),
        e.inner,
        evaluation={**evaluation, **final},
        device=e.device,
        gpu=Gpu(e.deterministic, e.tf32),
        reads=user_parts.read_by_workers,
        root=x.root,
        held=ClosureTensors(tries=x.authors_code),
        captures=Captures(compiles=e.capture == "compiled") if e.capture and timeout is None else Captures(after=None),
    )


def _seen(x: Federated, evaluation: Splits, final: Splits, attack: Attacking | None, algorithm: Algorithm) -> Seen:
    """Try an algorithm on very little, to see what its clients send."""
    return tried(algorithm, x.z, x.problem, _setup(x, evaluation, final, attack, algorithm))


def wrapped(
    config: Config,
    algorithm: Algorithm,
    about: Context,
    up: Sequence[Step],
    down: Sequence[Step],
    attack: Attacking | None,
) -> tuple[Algorithm, tuple[Promise, ...]]:
    """Return an algorithm with the features of a configuration around it, the last nearest to the clients, and its promises.

    Of what changes messages (``Phase.uplink``) what is put on first acts first.

    Raises ConfigError.
    """
    algorithm, promises = promised(config.privacy, config.example_privacy, algorithm, about)
    algorithm = sending(up, algorithm, about)
    algorithm = summed(config.secure_aggregation, algorithm, about)
    if attack is not None:
        algorithm = attack.on(algorithm)
    if config.evaluation.cosines:
        algorithm = watched(algorithm, about.domains)
    return receiving(down, algorithm, about), promises


def assemble(x: Federated) -> Assembled:
    """Return the algorithm with its features around it. Raises ConfigError."""
    config, data = x.config, x.data
    evaluation, final = evaluation_data(config, data, x.validation), final_data(config, data)
    attack = placed(config.attack, x.task, x.population.size, config.seed, evaluation["test"], data.test.classes)
    if attack is not None:
        evaluation |= attack.splits(evaluation)
        final |= attack.splits(final)
    seen = partial(_seen, x, evaluation, final, attack)
    root.check_work(x.bare, seen)
    if (key := persists(config.algorithm)) is not None:  # the later of two answers would keep its state
        check([Need(f"{key}='persist'", (Fact.ONCE,))], of_trial(x.bare, seen(x.bare), config.algorithm.name))
    about = requirements.context(config, x.task, x.problem, x.population.summary(), seen, x.breaks)
    algorithm, promises = wrapped(config, x.bare, about, x.up, x.down, attack)
    check_libraries(x.task, x.z, {**evaluation, **final})
    made = Assembled(
        **so_far(x),
        evaluation=evaluation,
        final=final,
        attack=attack,
        algorithm=algorithm,
        promises=promises,
        examples=weights.told(data, evaluation["test"]["y"], x.problem.clients * x.population.summary().mean_examples),
    )
    resolve.check_metrics(config, made.metric_names)
    return made
