"""Differential privacy of clients: the mechanism, what it refuses, the noise it takes, the epsilon it spends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from fedfleet.middleware.context import Context
from fedfleet.middleware.facts import Fact, Need, check, of_trial
from fedfleet.middleware.privacy import accounting
from fedfleet.middleware.privacy.hidden import NORM, SHARE, WITHIN, Hidden
from fedfleet.middleware.privacy.noise import Adaptive, Ledger, Mechanism, Private, hiding, inverted, mixing, private
from fedfleet.middleware.privacy.options import Privacy
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.errors import ConfigError, FedfleetError

Accounting = Literal["poisson", "participation"]


@dataclass(frozen=True, kw_only=True)
class ClientDP:
    """What a run promises its clients, and what of it is spent.

    Attributes:
        delta: as configured.
        budget: epsilon that is not to be exceeded.
        accounting: as configured.
        rate: probability with which each client is asked in a round, where nobody knows who was.
        mechanism: what is done.
        rounds: those the run is to have.
        fewest: answers without which an exchange is aborted.
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

    def with_multiplier(self, multiplier: float) -> ClientDP:
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

    def plan_text(self) -> str:
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

    def summary(self, state: Any) -> dict[str, Any]:
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


def client_dp(options: Privacy, about: Context) -> ClientDP:
    """Return what a run with ``privacy`` promises, noise found where it is to be. Raises ConfigError."""
    clients = about.problem.clients
    if options.delta * clients >= 1:
        raise ConfigError(
            f"privacy.delta={options.delta:g}: telling all about one of {clients:,} clients at random would keep that promise: "
            f"give less than {1 / clients:.3g}"
        )
    why = _unamplified(options, about)
    if options.accounting == "poisson" and why is not None:
        raise ConfigError(f"privacy.accounting='poisson': {why}, or set privacy.accounting=participation")
    kind: Accounting = "participation" if why is not None or options.accounting == "participation" else "poisson"
    invite, follows = about.cohort.size, None
    if (a := options.adaptive) is not None:
        follows = Adaptive(a.quantile, a.lr, a.count_noise or invite / 20, NORM, WITHIN)
    whole = options.divide_by
    if whole == "auto":
        whole = float(invite) if kind == "poisson" else "completed"
    by_clients = options.noise == "clients"
    mechanism = Mechanism(
        clip=Hidden(norm=options.clip_norm, noisy=by_clients, tells=follows is not None),
        norm=options.clip_norm,
        multiplier=options.noise_multiplier or 0.0,
        divide_by=None if whole == "completed" else whole,
        shares=invite if by_clients else None,
        sent=SHARE,
        mixing=mixing(options.bands),
        empty=kind == "poisson",
        follows=follows,
    )
    made = ClientDP(
        delta=options.delta,
        budget=options.epsilon,
        accounting=kind,
        rate=min(1.0, invite / clients),
        mechanism=mechanism,
        rounds=max(1, about.rounds),
        fewest=about.cohort.min_responses,
    )
    if kind == "participation":
        made = replace(made, worst=_worst(about, made))
    if kind == "poisson" or made.worst is not None:
        made = replace(made, mechanism=made.mechanism._replace(invites=invite))
    if options.noise_multiplier is None:
        assert options.epsilon is not None
        made = made.with_multiplier(accounting.least_multiplier(options.epsilon, _spending(options, about, made)))
    if follows is not None and 2 * follows.count_noise <= (z := made.mechanism.multiplier):
        raise ConfigError(
            f"privacy.adaptive.count_noise={follows.count_noise:g}: counting would take all of a noise multiplier of {z:.3g}: "
            f"give more than {z / 2:.3g}"
        )
    first = Private(None, torch.zeros(()), options.clip_norm, made.mechanism.multiplier, Ledger.nothing())
    if about.rounds and not made.allows(first):
        raise ConfigError(
            f"privacy.epsilon={options.epsilon:g}: the first round could spend more with "
            f"privacy.noise_multiplier={options.noise_multiplier:g}: raise one of them, or leave the multiplier out"
        )
    return made


def _worst(about: Context, made: ClientDP) -> tuple[float, ...] | None:
    """Return what the client asked most may have spent after 0, 1, … exchanges; None where anybody may be asked any time."""
    invited, clients = about.invited, about.problem.clients
    if invited >= clients:
        invited = clients = 1
    elif about.selection != "round_robin":
        return None
    # Client a * invited + b of the order is asked as client b < invited is, a exchanges later, and of these client 0 most often.
    first = invited if len(made.mechanism.mixing) > 1 else 1
    ledger, result = Ledger.nothing(), [0.0]
    for t in range(made.rounds):
        turn = torch.arange(t * invited, (t + 1) * invited) % clients
        ledger = ledger.after(turn[turn < first], made.inverse, made.factor)
        result.append(ledger.most())
    return tuple(result)


def _spending(options: Privacy, about: Context, made: ClientDP) -> Callable[[float], float]:
    """Return what all rounds would spend with a multiplier. Raises ConfigError where nobody knows before."""
    if made.accounting == "poisson":
        return lambda z: accounting.of_sampling(z, made.rate, made.rounds, made.delta)
    if (worst := made.worst) is None:
        kind = about.selection
        why = f"how often selection.kind={kind!r} asks one client is not known before: set selection.kind="
        why += "round_robin" if kind == "poisson" else "poisson or round_robin"
        if kind == "poisson":  # which does not count here
            why = _unamplified(options, about) or f"{why}, or privacy.accounting=poisson"
        raise ConfigError(
            f"privacy.epsilon={made.budget:g}: {why}, or give privacy.noise_multiplier too, with which the run ends in time"
        )
    return lambda z: accounting.of_participation(z, worst[-1], made.delta)


def hidden(algorithm: Algorithm, made: ClientDP, about: Context) -> Algorithm:
    """Return the algorithm with what it takes to keep the promise. Raises ConfigError where it sends what that does not hide."""
    result = private(algorithm, made.mechanism, made.rounds)
    try:
        seen = about.tried(result)
    except ConfigError:
        raise
    except FedfleetError as e:
        raise ConfigError(f"privacy: {about.name}: {e}: leave privacy out, or choose fedavg") from None
    check([Need("privacy", (Fact.ONCE,))], of_trial(result, seen, about.name))
    return result


def _unamplified(options: Privacy, about: Context) -> str | None:
    """Return why it does not count that nobody is told who was asked; None where it does."""
    c, online, devices = about.cohort, about.availability, about.devices
    if about.selection != "poisson":
        return f"selection.kind={about.selection!r} draws clients together: set selection.kind=poisson"
    if about.aborts is not None:
        return f"{about.aborts}, and whether a round counts depends on how many others are there: leave it out"
    if options.noise == "clients":
        return "noise='clients' grows with the clients heard: leave it out"
    if options.bands > 1:
        return f"bands={options.bands} correlates rounds, in which a client may have been asked more than once: leave it out"
    if options.divide_by == "completed":
        return "divide_by='completed' tells how many were: leave it out"
    for key, value, none in (
        ("wait_for", c.wait_for, "all"),
        ("over_select", c.over_select, 1.0),
        ("min_responses", c.min_responses, 1),
        ("deadline_s", c.deadline_s, None),
    ):
        if value != none:
            return f"cohort.{key}={value} makes who is heard depend on the others, or on how much a client has to do: leave it out"
    if online.follows is not None:
        return f"availability.kind={online.name!r} makes who is online depend on the data that are to be hidden: choose another"
    if online.clocked:
        return (
            f"availability.kind={online.name!r} goes by the clock, hence who is online by how long others took before: "
            f"choose another"
        )
    if own := [part.name for part in (online, devices) if part.own]:
        return f"of {own[0]!r}, your own, nobody knows whether it goes by the data that are to be hidden: choose a built-in one"
    if devices.fails:
        return "devices.failures_per_hour makes clients with more to do fail more often: leave it out"
    return None
