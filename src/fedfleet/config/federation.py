"""The behaviour of clients and server that a configuration describes."""

from __future__ import annotations

from functools import partial

from fedfleet.algorithms.options import CohortOptions
from fedfleet.config import availability, devices
from fedfleet.config.plugin_checks import check_online, check_selection, check_times, check_transform
from fedfleet.config.plugins import made, place
from fedfleet.config.schema import Config
from fedfleet.config.selection import SCANNED, SELECTIONS, asked
from fedfleet.middleware.compression.options import Step, check_order
from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.simulator.fleet.availability import Availability, InRounds
from fedfleet.simulator.fleet.online.trace import Trace
from fedfleet.simulator.fleet.policies import Deadline, First, ResponsePolicy, Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.fleet.selection import RoundRobin, Selection
from fedfleet.simulator.population import Population


def federation(config: Config, population: Population) -> Federation:
    """Return how clients and their devices behave, and whom the server waits for. Raises ConfigError."""
    root = rng.key(config.seed)
    keys = {section: rng.fold(root, section) for section in ("availability", "devices")}
    told = {section: {"key": key, "seed": config.seed, "population": population} for section, key in keys.items()}
    if (here := place(config, "availability")) is not None:
        online = made(config, here, partial(check_online, population=population), **told["availability"])
    else:
        about = availability.Context(keys["availability"], population)
        online = availability.AVAILABILITY.build(config.availability, about)
    check_answers(config, online)
    if (here := place(config, "devices")) is not None:
        said = device = made(config, here, partial(check_times, population=population), **told["devices"])
    else:
        said = config.devices
        device = devices.DEVICES.build(said, devices.Context(keys["devices"], population))
    return Federation(
        availability=online,
        devices=device,
        policy=policy(config.cohort),
        hazard=getattr(said, "failures_per_hour", 0.0) / 3600,  # an author's own may have it, too
        partial_work=config.cohort.partial_work,
    )


def steps(config: Config, way: str) -> list[Step]:
    """Return the transforms on a way, ``up`` or ``down``. Raises ConfigError."""
    section, result = f"transforms.{way}", []
    for i, part in enumerate(getattr(config.transforms, way)):
        here = place(config, section, i)
        does = part if here is None else made(config, here, check_transform)
        result.append(Step(f"{section}[{i}]", part.name, does))
    check_order(way, result)
    return result


def check_answers(config: Config, online: Availability | InRounds) -> None:
    """Refuse to wait for more answers than there are clients that are ever online. Raises ConfigError."""
    if not isinstance(online, Trace) or online.numbers is None:
        return  # under all others, any client can be online
    c, reachable = config.cohort, len(online.numbers)
    wanted = {"min_responses": c.min_responses}
    if c.over_select > 1:
        wanted["size"] = c.size
    elif c.wait_for == "siwer":
        wanted["wait_for"] = c.fewest
    elif isinstance(c.wait_for, int):
        wanted["wait_for"] = c.wait_for
    for name, answers in wanted.items():
        if answers > reachable:
            least = f", at least {answers} answers" if getattr(c, name) == "siwer" else ""
            path = config.availability.path if isinstance(config.availability, availability.TraceOptions) else None
            raise ConfigError(
                f"cohort.{name}={show(getattr(c, name))}{least}: only {reachable} clients have intervals in availability.path="
                f"{path!r}, and no other is ever online: lower it, or use availability.map=seeded"
            )


def policy(cohort: CohortOptions) -> ResponsePolicy:
    """Return whom the server waits for."""
    result: ResponsePolicy = WaitAll()
    if cohort.over_select > 1:
        result = First(cohort.size)
    elif cohort.wait_for == "siwer":
        result = Siwer(cohort.response_low, cohort.response_high)
    elif isinstance(cohort.wait_for, int):
        result = First(cohort.wait_for)
    return result if cohort.deadline_s is None else Deadline(cohort.deadline_s, result)


def selection(config: Config, problem: Problem) -> Selection:
    """Return whom the server invites. Raises ConfigError where the population is too large for it."""
    if (here := place(config, "selection")) is not None:
        size = min(asked(config.cohort), problem.clients)
        return made(config, here, partial(check_selection, problem=problem, size=size), seed=config.seed)
    chosen, clients = config.selection, config.population.clients or 0
    if chosen.scans and clients > SCANNED:
        raise ConfigError(
            f"selection.kind={chosen.kind!r}: it looks at every client each round, which {clients:,} are too many for: use uniform "
            f"or oort"
        )
    chosen.check(asked(config.cohort), problem.clients)
    result = SELECTIONS.build(chosen, config.seed)
    budgets = (promise.epsilon for promise in (config.privacy, config.example_privacy) if promise is not None)
    # What is reckoned of turns before a run holds only if aborted attempts take none.
    turns = isinstance(result, RoundRobin) and any(epsilon is not None for epsilon in budgets)
    return RoundRobin(config.seed, again=True) if turns else result
