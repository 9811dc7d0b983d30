"""The last stage: who takes part and how fast, whom the server asks, where it runs; a configuration ready to run."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from safetensors import SafetensorError

from fedfleet.assembly import user_parts
from fedfleet.assembly.algorithm import Assembled, assemble
from fedfleet.assembly.data import load, so_far
from fedfleet.assembly.decision_boundary import decision_boundary
from fedfleet.assembly.duality_gap import DomainLosses
from fedfleet.assembly.executors import EXECUTORS
from fedfleet.assembly.federation import federate
from fedfleet.assembly.measures import try_evaluation
from fedfleet.assembly.provenance import differences, same
from fedfleet.assembly.weights import plain_code
from fedfleet.config import participation, resolve, timing
from fedfleet.config.federation import federation, selection
from fedfleet.config.population import Data
from fedfleet.config.schema import Config
from fedfleet.config.user_data import sampled
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.driver.client_metrics import ClientMetrics, evaluate_clients, states
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.state import ClientStore
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.fleet.selection import Selection
from fedfleet.simulator.population import Population


@dataclass(frozen=True, kw_only=True)
class Ready(Assembled):
    """A run, its configuration with every ``auto`` resolved.

    Attributes:
        chosen: whether a rule, not the configuration, says where it runs.
        of_ray: whether the configuration has an option of Ray's; a resolved one has all of them.
        federation, selection: how clients behave, and whom the server invites.
        participation_advice: lines on what of a correction will rarely do.
        costs: what a client's answer takes.

    """

    chosen: bool
    of_ray: bool
    federation: Federation
    selection: Selection
    participation_advice: list[str]
    costs: timing.Costs


def ready(x: Assembled) -> Ready:
    """Return a run of what was assembled. Raises ConfigError."""
    config = resolve.resolved(x.config, x.answers, len(x.algorithm.phases), x.z, lambda: x.notes)
    behaviour, costs = federation(config, x.population), timing.costs(config, x.algorithm, x.z, lambda: x.notes)
    advice = participation.advice(config, x.algorithm, behaviour, x.population)
    timing.check_deadline(config, behaviour, x.algorithm, x.population, costs)
    made = Ready(
        **so_far(x, config=config),
        chosen=x.config.executor.kind == "auto",
        of_ray=x.config.executor.of_ray,
        federation=behaviour,
        selection=selection(config, x.problem),
        participation_advice=advice,
        costs=costs,
    )
    if "notes" in vars(x):  # learnt once
        vars(made)["notes"] = x.notes
    return made


class Prepared(Ready):
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
        given = user_parts.parts(task, algorithm, population, data)
        made = ready(assemble(federate(load(config, given, loaded), task, algorithm)))
        vars(self).update(vars(made))
        self._scorer: str | None = None
        self._made_of = given.describe()  # once more: what was computed here may be kept there

    def recorded_as(self, config: Config) -> Self:
        """Return the same run, whose record has another configuration."""
        other = copy(self)
        vars(other)["config"] = config
        return other

    def prepare(self, say: Callable[[str], None]) -> str | None:
        """Let the task make ready, once, what it measures with; return what that is. Raises ConfigError."""
        if self._scorer is None:
            self._scorer = self._made_ready(say)
        return self._scorer

    def _made_ready(self, say: Callable[[str], None]) -> str | None:
        ready = getattr(self.task, "prepare", None)
        if ready is None or self.train is None:
            return None
        try:
            return ready(self.train.x, self.train.y, say)
        except (OSError, SafetensorError, ValueError) as e:
            raise ConfigError(one_line(e)) from None

    def images(self, z: Tree) -> torch.Tensor | None:
        """Return images (n, c, h, w) that a model generates, where the task is to generate any."""
        draw = getattr(self.task, "images", None)
        if draw is None:
            return None
        with torch.no_grad():
            return draw(z)

    def decision_boundary(self, z: Tree) -> dict[str, torch.Tensor] | None:
        """Return what a model says of the plane, where examples are points of it."""
        return decision_boundary(self.task, z, self.evaluation["test"])

    @cached_property
    def net_code(self) -> tuple[str, str] | None:
        """Return the task's net as ``plain_code`` does, made once."""
        return plain_code(self.task)

    @cached_property
    def _losses(self) -> DomainLosses:
        return DomainLosses(self.task, self.population)

    def of_state(self, state: Any) -> dict[str, float]:
        """Return what is measured of an algorithm's state itself: the duality gap, the privacy that is spent, where asked for."""
        result = {promise.column: promise.epsilon(state) for promise in self.promises}
        if self.config.evaluation.duality_gap and self.algorithm.saddle is not None:
            result["duality_gap"] = self._losses.gap(self.algorithm.saddle(state, self.problem))
        return result

    def try_out(self) -> None:
        """Try client code and evaluation on very little, before anything is written.

        Raises Impure, and ConfigError where what was made in Python has changed since this was made of it.
        """
        now = self.given.describe()
        for part, was in self._made_of.items():
            if not same(was, now[part]):
                before, here = differences(was, now[part])
                raise ConfigError(
                    f"{part} {was['name']}: it was changed ({before}, now {here}) after this Experiment was made of it: make "
                    f"another Experiment"
                )
        with torch.random.fork_rng(devices=[]):
            if self.own_work:  # what comes with fedfleet is known to be pure, and a large net takes its time
                _ = self.notes
            if not getattr(self.task, "whole", False):
                functions = ["per_example"] * self.config.evaluation.per_client + ["predict"]
                try_evaluation(self.task, replace(self.setup(), device="cpu"), self.z, functions)

    @property
    def found(self) -> Notes | None:
        """Return what a trial has taught; None where nothing asked for one."""
        return vars(self).get("notes")

    def evaluate_clients(
        self, executor: Executor, z: Tree, state: Any, rounds: int, store: ClientStore
    ) -> ClientMetrics | None:
        """Return every client's metrics at the model ``z`` of a state after so many rounds, where they are evaluated."""
        if not self.config.evaluation.per_client:
            return None
        given: dict[str, Any] = {}
        if self.personal is not None:
            message = self.personal.message(state, max(rounds - 1, 0))
            given = {"message": message, "client_state": states(store, self.personal, message)}
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
            skip_aborted=c.on_abort == "skip",
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
