"""Needs and breaks of all parts of a configuration, and the context that features see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fedfleet.algorithms.lasting import persists, reset
from fedfleet.algorithms.participation import Correction
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.availability import known
from fedfleet.config.participation import KEY, correction, without_all_heard
from fedfleet.config.resolve import looked_at
from fedfleet.config.schema import Config
from fedfleet.config.selection import asked
from fedfleet.middleware.attacks import wrap as attacks
from fedfleet.middleware.compression import options as compression
from fedfleet.middleware.compression.options import Step
from fedfleet.middleware.context import Context, Kind
from fedfleet.middleware.cosines import watched as cosines
from fedfleet.middleware.facts import Break, Fact, Need, of_algorithm
from fedfleet.middleware.privacy import options as privacy
from fedfleet.middleware.secure_aggregation import options as secure_aggregation
from fedfleet.middleware.trial import Seen
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.errors import show
from fedfleet.simulator.population import Summary
from fedfleet.simulator.registry import ByPath
from fedfleet.simulator.work import BUFFERS
from fedfleet.tasks.options import named_net

ON_CLIENTS = ("eval/train_", "eval/clients_", "eval/own_", "eval/duality_gap")
"""Beginnings of metrics that are measured on what clients have."""


def needs(config: Config, algorithm: Algorithm, up: Sequence[Step], down: Sequence[Step]) -> Iterator[Need]:
    """Yield what all parts of a configuration need, with its transforms as they were made."""
    yield from privacy.needs(config.privacy, config.example_privacy)
    yield from secure_aggregation.needs(config.secure_aggregation)
    yield from compression.needs(up, down)
    yield from attacks.needs(config.attack)
    yield from cosines.needs(config.evaluation.cosines)
    yield from _of_algorithm(config, algorithm)
    yield from _of_cohorts(config)
    if (key := persists(config.algorithm)) is not None:
        yield Need(f"{key}='persist'", (Fact.COHORTS,))
    if config.evaluation.duality_gap:
        yield Need("evaluation.duality_gap=true", (Fact.SADDLE, Fact.CONVEX, Fact.CLEAN))


def _of_algorithm(config: Config, algorithm: Algorithm) -> Iterator[Need]:
    name, how = config.algorithm.name, correction(config)
    if algorithm.asynchronous or algorithm.domains is not None or algorithm.roles:
        yield Need(name, (Fact.UNIFORM,), "")
    if not algorithm.buffers:
        yield Need(f"{name}, whose server does not average models,", (Fact.NO_STATISTICS,), "")
    if algorithm.convex:
        yield Need(f"the theorem behind the steps of {name}", (Fact.CONVEX,), "algorithm.theory")
    if algorithm.chances is not None or (isinstance(how, Correction) and how.count == "invitations"):
        yield Need(name, (Fact.EVEN,), KEY if how is not None else "")
    if algorithm.chances == "absolute":
        yield Need(name, (Fact.ALL_HEARD,), KEY)
    if how is not None and how.remembers:
        yield Need(f"{KEY}={how.kind!r}", (Fact.EXACT,))


def _of_cohorts(config: Config) -> Iterator[Need]:
    cohort = config.cohort
    if cohort.late == "keep":
        yield Need("cohort.late='keep'", (Fact.STATELESS, Fact.LASTING))
    for name in sorted(cohort.model_fields_set - {"attempts", "retry_s"}):
        if (value := getattr(cohort, name)) != type(cohort).model_fields[name].default:
            yield Need(f"cohort.{name}={show(value)}", (Fact.COHORTS,))
    if config.executor.train_all:
        yield Need("executor.train_all=true", (Fact.COHORTS,))


def breaks(
    config: Config, algorithm: Algorithm, task: Task, up: Sequence[Step], down: Sequence[Step]
) -> Iterator[Break]:
    """Yield what all parts of a configuration take away, with its transforms as they were made."""
    weight = "algorithm.weight" if "weight" in type(config.algorithm).model_fields else None
    yield from _by_algorithm(config, algorithm, task, weight)
    yield from privacy.breaks(config.privacy)
    yield from secure_aggregation.breaks(config.secure_aggregation)
    yield from compression.breaks(up, down)
    yield from attacks.breaks(config.attack)
    yield from _by_task(config, task)
    yield from _by_selection(config.selection)
    yield from _by_cohorts(config)
    yield from _by_what_is_looked_at(config)
    online = availability(config.availability)
    if online.own or online.follows in ("labels", "regions"):
        why = f"who is online {'may go' if online.own or online.follows == 'regions' else 'goes'} by labels"
        yield Break(Fact.NOT_BY_LABELS, why, f"availability.kind={online.name!r}", "choose another")
    if config.domains.asked:
        why = "clients of these domains have no labels"
        yield Break(Fact.LABELLED, why, f"domains.target={show(config.domains.target)}")


def _by_algorithm(config: Config, algorithm: Algorithm, task: Task, weight: str | None) -> Iterator[Break]:
    """Yield what the algorithm takes away, that which it would not without one of its options by the key of that."""
    name = config.algorithm.name
    result = list(of_algorithm(algorithm, name, weight))
    for key, plain in () if isinstance(config.algorithm, ByPath) else _without(config):
        before = {b.fact for b in of_algorithm(ALGORITHMS.build(plain, task, config.cohort), name, weight)}
        result = [b if b.key is not None or b.fact in before else replace(b, key=key, fix="") for b in result]
    yield from result


def _without(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield options around an algorithm with their values, and the algorithm's section without them and those before."""
    plain, how = config.algorithm, correction(config)
    if (key := persists(plain)) is not None:
        plain = reset(plain)
        yield f"{key}='persist'", plain
    if how is not None:
        yield f"{KEY}={how.kind!r}", plain.model_copy(update={"correction": type(how)()})


def _by_task(config: Config, task: Task) -> Iterator[Break]:
    if BUFFERS in task.parts:
        why, fix = "its net has layers of statistics (BatchNorm)", "choose one of GroupNorm"
        yield Break(Fact.NO_STATISTICS, why, f"task.name={config.task.name!r}", fix)
    if (model := named_net(config.task).model) != "logistic":
        yield Break(Fact.CONVEX, "its loss is not", f"task.model={model!r}", "set task.model=logistic")


def _by_selection(given: Any) -> Iterator[Break]:
    name, own = given.kind, isinstance(given, ByPath)
    key, fix = f"selection.kind={name!r}", "choose uniform"
    if name != "uniform":
        yield Break(Fact.UNIFORM, "it draws clients otherwise", key, fix)
    if own or not given.even:
        yield Break(Fact.EVEN, "it asks some clients more often than others", key, fix)
    if own or given.looks:
        yield Break(Fact.UNLOOKED, f"it {'may look' if own else 'looks'} at clients' losses", key, fix)
    if not own and given.sizes:
        yield Break(Fact.COUNTS_HIDDEN, "whom it asks tells how much they hold", key, "choose poisson or uniform")


def _by_cohorts(config: Config) -> Iterator[Break]:
    c, instead = config.cohort, without_all_heard(config)
    if c.late == "keep":
        yield Break(Fact.OWN_ROUND, "a late answer counts in a later round", "cohort.late='keep'")
    for key, value, none in (
        ("wait_for", c.wait_for, "all"),
        ("over_select", c.over_select, 1.0),
        ("deadline_s", c.deadline_s, None),
    ):
        if value != none:
            yield Break(Fact.ALL_HEARD, "not all who are online are heard", f"cohort.{key}={value}", instead)
    for key in ("on_client_error", "non_finite"):
        if getattr(config.faults, key) == "drop_client":
            why = "a client is left out for what it sends"
            yield Break(Fact.ALL_KEPT, why, f"faults.{key}='drop_client'", "choose fail")
    if config.faults.non_finite == "keep":
        yield Break(Fact.FINITE, "what is not finite is kept", "faults.non_finite='keep'", "choose fail")


def _by_what_is_looked_at(config: Config) -> Iterator[Break]:
    if config.stop_if_diverged is not None:
        why = "it looks at clients' losses"
        yield Break(Fact.LOSSES_HIDDEN, why, f"stop_if_diverged={config.stop_if_diverged}")
    for key, metric in looked_at(config).items():
        if metric and metric.startswith(ON_CLIENTS):
            fix = "choose a metric of test or validation examples"
            yield Break(Fact.LOSSES_HIDDEN, "it is measured on what clients have", f"{key}={show(metric)}", fix)


def availability(given: Any) -> Kind:
    """Return what features may know of who is online."""
    name, online = given.kind, known(given)
    if online is None:
        return Kind(name=name, own=True)
    return Kind(name=name, follows=online.follows, clocked=online.clocked)


def devices(given: Any) -> Kind:
    """Return what features may know of how fast clients are."""
    name = given.kind
    if isinstance(given, ByPath):
        return Kind(name=name, own=True)
    return Kind(name=name, fails=bool(given.failures_per_hour))


def context(
    config: Config,
    task: Task,
    problem: Problem,
    summary: Summary,
    tried: Callable[[Algorithm], Seen],
    broken: Sequence[Break],
) -> Context:
    """Return what features may know of the run."""
    return Context(
        name=config.algorithm.name,
        rounds=config.rounds,
        cohort=config.cohort,
        invited=asked(config.cohort),
        selection=config.selection.kind,
        availability=availability(config.availability),
        devices=devices(config.devices),
        task=task,
        problem=problem,
        max_examples=summary.max_examples,
        domains=summary.domains,
        tried=tried,
        breaks=tuple(broken),
        aborts=secure_aggregation.aborts(config.secure_aggregation),
    )
