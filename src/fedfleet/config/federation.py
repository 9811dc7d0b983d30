"""The behaviour of clients and server that a configuration describes."""

from __future__ import annotations

from fedfleet.algorithms.options import CohortOptions
from fedfleet.config import availability, devices
from fedfleet.config import schema as C
from fedfleet.config.reading import show
from fedfleet.config.schema import Config
from fedfleet.config.selection import SCANNED, SELECTIONS
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.availability import Availability
from fedfleet.simulator.fleet.online.trace import Trace
from fedfleet.simulator.fleet.policies import Deadline, First, ResponsePolicy, Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.fleet.selection import Selection
from fedfleet.simulator.population import Population


def federation(config: Config, population: Population) -> Federation:
    """Return how clients and their devices behave, and whom the server waits for. Raises ConfigError."""
    root = rng.key(config.seed)
    online = availability.AVAILABILITY[C.named(config, "availability")].build(
        C.options(config, "availability"), availability.Context(rng.fold(root, "availability"), population)
    )
    check_answers(config, online)
    device = devices.DEVICES[C.named(config, "devices")]
    given = C.options(config, "devices")
    return Federation(
        availability=online,
        devices=device.build(given, devices.Context(rng.fold(root, "devices"), population)),
        policy=policy(config.cohort),
        hazard=given.failures_per_hour / 3600,
        partial_work=config.cohort.partial_work,
    )


def check_answers(config: Config, online: Availability) -> None:
    """Refuse to wait for more answers than there are clients that are ever online. Raises ConfigError."""
    if not isinstance(online, Trace) or online.numbers is None:
        return  # under all others, any client can be online
    c, reachable = config.cohort, len(online.numbers)
    wanted = {"min_responses": c.min_responses}
    if c.over_select > 1:
        wanted["invite"] = c.invite
    elif c.respond == "siwer":
        wanted["respond"] = c.fewest
    elif isinstance(c.respond, int):
        wanted["respond"] = c.respond
    for name, answers in wanted.items():
        if answers > reachable:
            least = f", at least {answers} answers" if getattr(c, name) == "siwer" else ""
            raise ConfigError(
                f"cohort.{name}={show(getattr(c, name))}{least}: only {reachable} clients have intervals in availability.path="
                f"{C.options(config, 'availability').path!r}, and no other is ever online: lower it, or use availability.map=seeded"
            )


def policy(cohort: CohortOptions) -> ResponsePolicy:
    """Return whom the server waits for."""
    found: ResponsePolicy = WaitAll()
    if cohort.over_select > 1:
        found = First(cohort.invite)
    elif cohort.respond == "siwer":
        found = Siwer(cohort.response_low, cohort.response_high)
    elif isinstance(cohort.respond, int):
        found = First(cohort.respond)
    return found if cohort.deadline_s is None else Deadline(cohort.deadline_s, found)


def selection(config: Config) -> Selection:
    """Return whom the server invites. Raises ConfigError where the population is too large for it."""
    name = C.named(config, "selection")
    kind, clients = SELECTIONS[name], config.population.clients or 0
    if kind.scans and clients > SCANNED:
        raise ConfigError(
            f"selection.kind={name!r}: it looks at every client each round, which {clients:,} are too many for: use uniform or oort"
        )
    return kind.build(C.options(config, "selection"), config.seed)
