"""What a run promises its clients: the mechanism, where it is refused, how much noise it takes, what is spent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from fedfleet.config import accounting
from fedfleet.config.availability import follows
from fedfleet.config.privacy import Privacy
from fedfleet.config.reading import show
from fedfleet.config.resolve import parse_until
from fedfleet.config.schema import Config
from fedfleet.config.selection import asked
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.arithmetic.reduction import Mean
from fedfleet.simulator.driver.privacy import Adaptive, Ledger, Mechanism, Private, hiding, inverted, mixing, private
from fedfleet.simulator.driver.transformed import Seen
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.registry import ByPath
from fedfleet.simulator.work import BUFFERS
from fedfleet.transforms.clip import NORM, SHARE, WITHIN, Hidden

Accounting = Literal["poisson", "participation"]
OF_CLIENTS = ("eval/train_", "eval/clients_", "eval/own_", "eval/duality_gap")
"""How metrics begin that are measured on what clients have."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What a run promises its clients, and what of it is spent.

    Attributes:
        delta: as configured.
        budget: epsilon that is not to be exceeded.
        accounting: as configured.
        rate: probability with which each client is asked in a round, where nobody knows who was.
        mechanism: what is done.
        rounds: those the run is to have.
        fewest: answers without which an exchange is void.
        worst: what a client may have spent at most after so many exchanges (rounds + 1,), where the selection tells; else None.

    """

    delta: float
    budget: float | None
    accounting: Accounting
    rate: float
    mechanism: Mechanism
    rounds: int
    fewest: int
    worst: tuple[float, ...] | None = None

    @property
    def factor(self) -> float:
        """By how much less the variance of the noise may be than planned: where clients bring it, and few are heard."""
        return 1.0 if self.mechanism.shares is None else self.mechanism.shares / self.fewest

    def with_multiplier(self, multiplier: float) -> Guarantee:
        """Return the same with other noise."""
        return replace(self, mechanism=self.mechanism._replace(multiplier=multiplier))

    column = "epsilon_spent"
    key = "privacy"

    def epsilon(self, state: Any) -> float:
        """Return what has been spent."""
        at = hiding(state)
        if self.accounting == "poisson":
            return self._sampled(at.multiplier, at.ledger.exchanges)
        return accounting.of_participation(at.multiplier, at.ledger.most(), self.delta)

    def allows(self, state: Any) -> bool:
        """Say whether another exchange, whoever is heard in it, stays within the budget."""
        at = hiding(state)
        if self.budget is None:
            return True
        if self.accounting == "poisson":
            return at.ledger.exchanges < self._exchanges(at.multiplier, self.budget)
        if self.worst is not None:
            most = self.worst[at.ledger.exchanges + 1]
        else:
            everybody = torch.cat([at.ledger.clients, torch.tensor([-1])])  # one more, that has not been heard yet
            most = at.ledger.after(everybody, self.inverse, self.factor).most()
        return accounting.of_participation(at.multiplier, most, self.delta) <= self.budget

    @cached_property
    def inverse(self) -> torch.Tensor:
        """The coefficients of the inverse of the noise's mixing."""
        return inverted(self.mechanism.mixing, self.rounds)

    def _sampled(self, multiplier: float, exchanges: int) -> float:
        return accounting.of_sampling(multiplier, self.rate, exchanges, self.delta)

    def _exchanges(self, multiplier: float, budget: float) -> int:
        """Return how many exchanges the budget allows, of those the run is to have."""
        few, many = 0, self.rounds + 1  # the budget allows few, and many are too many
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if self._sampled(multiplier, middle) <= budget else (few, middle)
        return few

    def told(self) -> str:
        """Return what a plan says."""
        m, rounds = self.mechanism, f"{self.rounds:,} rounds"
        if self.accounting == "poisson":
            spent = (
                f"epsilon {self._sampled(m.multiplier, self.rounds):.3g} after {rounds}, nobody knowing who was asked"
            )
        else:
            most = (
                "as many as the client heard most spends"
                if self.worst is None
                else (
                    f"{accounting.of_participation(m.multiplier, self.worst[-1], self.delta):.3g} at most after {rounds}"
                )
            )
            spent = f"epsilon {most}, as if all knew who was heard"
        return f"noise of {m.multiplier:.4g} times a norm of {m.norm:g}: {spent}; delta {self.delta:g}"

    def said(self, state: Any) -> dict[str, Any]:
        """Return what ``summary.json`` says."""
        at = hiding(state)
        known, follows = self.accounting == "participation", self.mechanism.follows
        return {
            "epsilon": self.epsilon(at),
            "delta": self.delta,
            "budget": self.budget,
            "noise_multiplier": at.multiplier,
            "noise_multiplier_of_messages": at.multiplier if follows is None else follows.of_messages(at.multiplier),
            "clip_norm": at.norm,
            "unit": "client",
            "neighbours": "a client adds nothing, and is heard as before" if known else "a client added or removed",
            "accounting": self.accounting,
            "sampling_rate": None if known else self.rate,
            "exchanges": at.ledger.exchanges,
            "clients_heard": len(at.ledger.clients),
            "spent_most": at.ledger.most() if known else None,
        }


def guaranteed(config: Config, algorithm: Algorithm, task: Task, clients: int) -> Guarantee:
    """Return what a configuration with ``privacy`` promises, noise found where it is to be. Raises ConfigError."""
    given = config.privacy
    assert given is not None
    _check(config, given, algorithm, task, clients)
    why = _unamplified(config, given)
    if given.accounting == "poisson" and why is not None:
        raise ConfigError(f"privacy.accounting='poisson': {why}, or set privacy.accounting=participation")
    kind: Accounting = "participation" if why is not None or given.accounting == "participation" else "poisson"
    invite, follows = config.cohort.invite, None
    if (a := given.adaptive) is not None:
        follows = Adaptive(a.quantile, a.lr, a.count_noise or invite / 20, NORM, WITHIN)
    whole = given.divide_by
    if whole == "auto":
        whole = float(invite) if kind == "poisson" else "heard"
    by_clients = given.noise == "clients"
    mechanism = Mechanism(
        clip=Hidden(norm=given.clip_norm, noisy=by_clients, tells=follows is not None),
        norm=given.clip_norm,
        multiplier=given.noise_multiplier or 0.0,
        divide_by=None if whole == "heard" else whole,
        shares=invite if by_clients else None,
        sent=SHARE,
        mixing=mixing(given.bands),
        empty=kind == "poisson",
        follows=follows,
    )
    made = Guarantee(
        delta=given.delta,
        budget=given.epsilon,
        accounting=kind,
        rate=min(1.0, invite / clients),
        mechanism=mechanism,
        rounds=max(1, config.rounds),
        fewest=config.cohort.min_responses,
    )
    if kind == "participation":
        made = replace(made, worst=_worst(config, made, clients))
    if kind == "poisson" or made.worst is not None:
        made = replace(made, mechanism=made.mechanism._replace(invites=invite))
    if given.noise_multiplier is None:
        assert given.epsilon is not None
        made = made.with_multiplier(accounting.least_multiplier(given.epsilon, _spending(config, made)))
    if follows is not None and 2 * follows.count_noise <= (z := made.mechanism.multiplier):
        raise ConfigError(
            f"privacy.adaptive.count_noise={follows.count_noise:g}: counting would take all of a noise multiplier of {z:.3g}: "
            f"give more than {z / 2:.3g}"
        )
    first = Private(None, torch.zeros(()), given.clip_norm, made.mechanism.multiplier, Ledger.nothing())
    if config.rounds and not made.allows(first):
        raise ConfigError(
            f"privacy.epsilon={given.epsilon:g}: the first round could spend more with "
            f"privacy.noise_multiplier={given.noise_multiplier:g}: raise one of them, or leave the multiplier out"
        )
    return made


def _worst(config: Config, made: Guarantee, clients: int) -> tuple[float, ...] | None:
    """Return what the client asked most may have spent after 0, 1, … exchanges; None where anybody may be asked any time."""
    invited = asked(config.cohort)
    if invited >= clients:
        invited = clients = 1
    elif config.selection.kind != "round_robin":
        return None
    # Client a * invited + b of the order is asked as client b < invited is, a exchanges later, and of these client 0 most often.
    first = invited if len(made.mechanism.mixing) > 1 else 1
    ledger, found = Ledger.nothing(), [0.0]
    for t in range(made.rounds):
        turn = torch.arange(t * invited, (t + 1) * invited) % clients
        ledger = ledger.after(turn[turn < first], made.inverse, made.factor)
        found.append(ledger.most())
    return tuple(found)


def _spending(config: Config, made: Guarantee) -> Callable[[float], float]:
    """Return what all rounds would spend with a multiplier. Raises ConfigError where nobody knows before."""
    if made.accounting == "poisson":
        return lambda z: accounting.of_sampling(z, made.rate, made.rounds, made.delta)
    if (worst := made.worst) is None:
        kind = config.selection.kind
        why = f"how often selection.kind={kind!r} asks one client is not known before: set selection.kind="
        why += "round_robin" if kind == "poisson" else "poisson or round_robin"
        if kind == "poisson":  # which does not count here
            assert config.privacy is not None
            why = _unamplified(config, config.privacy) or f"{why}, or privacy.accounting=poisson"
        raise ConfigError(
            f"privacy.epsilon={made.budget:g}: {why}, or give privacy.noise_multiplier too, with which the run ends in time"
        )
    return lambda z: accounting.of_participation(z, worst[-1], made.delta)


def hidden(algorithm: Algorithm, made: Guarantee, seen: Callable[[Algorithm], Seen], name: str) -> Algorithm:
    """Return the algorithm with what it takes to keep the promise. Raises ConfigError where it sends what that does not hide."""
    found = private(algorithm, made.mechanism, made.rounds)
    try:
        repeated = seen(found).repeated
    except ConfigError:
        raise
    except FedfleetError as e:
        raise ConfigError(f"privacy: {name}: {e}: leave privacy out, or choose fedavg") from None
    if repeated:
        raise ConfigError(f"privacy: {name} may ask a client twice in an exchange: leave privacy out, or choose fedavg")
    return found


def _check(config: Config, given: Privacy, algorithm: Algorithm, task: Task, clients: int) -> None:
    """Refuse what would not hide clients. Raises ConfigError."""
    name = config.algorithm.name
    if given.delta * clients >= 1:
        raise ConfigError(
            f"privacy.delta={given.delta:g}: telling all about one of {clients:,} clients at random would keep that promise: give "
            f"less than {1 / clients:.3g}"
        )
    mend = "leave privacy out, or choose fedavg"
    if algorithm.asynchronous:
        raise ConfigError(f"privacy: {name} is asynchronous, and who is heard depends on who was before: {mend}")
    slots = {slot: reduction for p in algorithm.phases for slot, reduction in p.reduce.items()}
    if len(algorithm.phases) > 1 or len(slots) > 1:
        raise ConfigError(
            f"privacy: clients of {name} send {', '.join(slots)}, and only a model alone is hidden: {mend}"
        )
    phase = next(iter(algorithm.phases))
    if phase.model is None or not isinstance(slots.get(phase.model), Mean):
        raise ConfigError(f"privacy: {name} does not say that the mean of clients' models is the next one: {mend}")
    if phase.weight != "uniform":
        key = "algorithm.weight" if "weight" in type(config.algorithm).model_fields else "privacy"
        raise ConfigError(
            f"{key}={phase.weight!r}: a client counts by what it has, which is to be hidden: set algorithm.weight=uniform"
            if key != "privacy"
            else f"privacy: {name} weighs clients by what they have or say ({phase.weight}): {mend}"
        )
    if phase.reweighted:
        raise ConfigError(
            f"privacy: {name} multiplies what rarely heard clients send, so that one client may move the model by more than "
            f"privacy.clip_norm: choose an algorithm without such weights, or leave privacy out"
        )
    if BUFFERS in task.parts:
        raise ConfigError(
            "privacy: layers with statistics (BatchNorm) send what is not clipped: choose a net without, such as one of GroupNorm"
        )
    check_looks(config, "privacy")
    if (kind := config.selection.kind) == "examples":
        raise ConfigError(
            f"selection.kind={kind!r}: whom it asks tells what clients have, which privacy is to hide: choose poisson or uniform"
        )
    if config.cohort.late == "keep":
        raise ConfigError(
            "cohort.late='keep': noise is reckoned for answers of their own round: leave it or privacy out"
        )
    if given.noise == "clients" and phase.uplink:
        raise ConfigError(
            f"privacy.noise='clients': {name} changes on its way what clients send, which would not add up: {mend}"
        )
    if given.noise == "clients" and config.transforms.up:
        raise ConfigError("privacy.noise='clients': what comes after it would not add up: leave transforms.up out")


def check_looks(config: Config, section: str) -> None:
    """Refuse what would tell what clients have, whatever is hidden of it. Raises ConfigError."""
    chosen = config.selection
    if isinstance(chosen, ByPath) or chosen.looks:
        verb = "may tell" if isinstance(chosen, ByPath) else "tells"
        raise ConfigError(
            f"selection.kind={config.selection.kind!r}: whom it asks {verb} what clients have, which {section} is to hide: choose "
            f"poisson or uniform"
        )
    if config.stop_if_diverged is not None:
        raise ConfigError(
            f"stop_if_diverged={config.stop_if_diverged}: it looks at clients' losses, which nothing hides: leave it or {section} "
            f"out"
        )
    for key in ("on_client_error", "non_finite"):
        if getattr(config.faults, key) == "drop_client":
            raise ConfigError(f"faults.{key}='drop_client': who is dropped tells what clients have: choose fail")
    if config.faults.non_finite == "keep":
        raise ConfigError(
            "faults.non_finite='keep': what is not finite is not clipped, and would show through all noise: choose fail"
        )
    for key, metric in (
        ("until", config.until and parse_until(config.until)[0]),
        ("patience.metric", config.patience and config.patience.metric),
        ("checkpoint.best", config.checkpoint.best),
    ):
        if metric and metric.startswith(OF_CLIENTS):
            raise ConfigError(
                f"{key}={show(metric)}: it is measured on what clients have, which {section} is to hide: choose a "
                f"metric of test or validation examples"
            )


def _unamplified(config: Config, given: Privacy) -> str | None:
    """Return why it does not count that nobody is told who was asked; None where it does."""
    c, kind = config.cohort, config.selection.kind
    if kind != "poisson":
        return f"selection.kind={kind!r} draws clients together: set selection.kind=poisson"
    if given.noise == "clients":
        return "noise='clients' grows with the clients heard: leave it out"
    if given.bands > 1:
        return (
            f"bands={given.bands} correlates rounds, in which a client may have been asked more than once: leave it out"
        )
    if given.divide_by == "heard":
        return "divide_by='heard' tells how many were: leave it out"
    for key, value, none in (
        ("respond", c.respond, "all"),
        ("over_select", c.over_select, 1.0),
        ("min_responses", c.min_responses, 1),
        ("deadline_s", c.deadline_s, None),
    ):
        if value != none:
            return f"cohort.{key}={value} makes who is heard depend on the others, or on how much a client has to do: leave it out"
    kind = config.availability.kind
    if not isinstance(config.availability, ByPath) and follows(config.availability) is not None:
        return (
            f"availability.kind={kind!r} makes who is online depend on the data that are to be hidden: choose another"
        )
    if kind in ("markov", "diurnal", "trace"):
        return (
            f"availability.kind={kind!r} goes by the clock, hence who is online by how long those took who were asked before: "
            f"choose another"
        )
    parts = {kind: config.availability, config.devices.kind: config.devices}
    if own := [name for name, part in parts.items() if isinstance(part, ByPath)]:
        return f"of {own[0]!r}, your own, nobody knows whether it goes by the data that are to be hidden: choose a built-in one"
    if config.devices.failures_per_hour:
        return "devices.failures_per_hour makes clients with more to do fail more often: leave it out"
    return None
