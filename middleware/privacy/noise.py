"""An algorithm whose server adds noise to what clients' clipped messages come to, whatever the algorithm.

McMahan, Ramage, Talwar & Zhang, "Learning differentially private recurrent language models", ICLR 2018, Algorithm 1, with the
fixed denominator of its estimator f_f; noise that is correlated over rounds as in Kairouz, McMahan, Song, Thakkar, Thakurta & Xu,
"Practical and private (deep) learning without sampling or shuffling", ICML 2021, by the banded matrix of Kalinin, McKenna, Upadhyay
& Lampert, "Back to square roots", 2025; norms that follow a quantile as in Andrew, Thakkar, McMahan & Ramaswamy, "Differentially
private learning with adaptive clipping", NeurIPS 2021, Algorithm 1.

    paper                here
    S, C                 norm, to which clients' messages are clipped
    z                    multiplier: the noise's standard deviation over the norm, in the sum
    q W                  divide_by: what the sum is divided by; None for the number of clients heard
    C^-1 (of A = B C)    ``mixing``: the noise of exchange t is sum_j mixing[j] g_{t-j}, g standard normal
    gamma, eta_C         quantile, lr
    sigma_b              count_noise

    exchange t    Delta <- (sum_i C(Delta_i) + z S noise_t) / W
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedfleet.middleware.privacy.invitation_limit import Asked
from fedfleet.simulator.algorithm import Algorithm, Around, Cohort, Reduced, Round, beneath, layer
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.noise import normals
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.driver.round import TooFewResponses
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.work import Message, Phase, Transform


class Adaptive(NamedTuple):
    """A norm that follows a quantile of clients' norms: S <- S exp(-lr (b - quantile)), b the noised share of those within it.

    The noise z is divided between the messages and the count, whose noise is ``count_noise`` at a sensitivity of 1/2. ``sent`` is
    the scalar by which the server tells the norm, ``told`` that by which a client tells whether it was within it.
    """

    quantile: float
    lr: float
    count_noise: float
    sent: str
    told: str

    def of_messages(self, multiplier: float) -> float:
        """Return the multiplier of the messages' noise, (z^-2 - (2 sigma_b)^-2)^(-1/2)."""
        return (multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5


class Mechanism(NamedTuple):
    """What is done to hide a client.

    Attributes:
        clip: the transform, the first on clients' messages' way, that bounds them.
        norm: S, in the beginning.
        multiplier: z, all told.
        divide_by: as above.
        shares: None where the server adds the noise; else clients add it, each a part in so many, in ``clip``, which is told the
            standard deviation over the norm by the scalar ``sent``.
        mixing: (b,), mixing[0] = 1: [1] for noise that is independent.
        empty: an exchange that nobody answers releases noise alone, so that it does not tell that nobody was there.
        follows: how the norm changes.
        invites: clients that are asked in a round, once, as the selection draws them, where that is what is reckoned with; else
            None. Where ``empty`` is true, too, the algorithm is not told who was heard.

    """

    clip: Transform
    norm: float
    multiplier: float
    divide_by: float | None
    shares: int | None = None
    sent: str = ""
    mixing: tuple[float, ...] = (1.0,)
    empty: bool = False
    follows: Adaptive | None = None
    invites: int | None = None


class Ledger(NamedTuple):
    """Who took part: exchanges so far, and of clients heard the numbers (n,) rising and what each has spent (n,) float64.

    What a client has spent is the square of the norm of what it may have added, noise's standard deviation as the unit, times z^2:
    sum_r (sum_s c[r - s])^2 over exchanges r so far and those s in which it was heard, c the inverse of ``mixing``. ``who`` and
    ``when`` (k,) are those exchanges, where an earlier one still counts.
    """

    exchanges: int
    clients: Tensor
    spent: Tensor
    who: Tensor
    when: Tensor

    @staticmethod
    def nothing() -> Ledger:
        """Return the ledger before the first exchange."""
        none = torch.zeros(0, dtype=torch.int64)
        return Ledger(0, none, none.double(), none, none)

    def after(self, heard: Tensor, inverse: Tensor, factor: float = 1.0) -> Ledger:
        """Return the ledger after an exchange in which clients (m,) were heard.

        ``inverse`` (T,) float64 is c, and ``factor`` by how much less the variance of the noise was than planned.
        """
        t = self.exchanges
        who, when = torch.cat([self.who, heard]), torch.cat([self.when, torch.full_like(heard, t)])
        lasts = t - when < len(inverse)
        who, when = who[lasts], when[lasts]
        clients, place = torch.cat([self.clients, heard]).unique(return_inverse=True)
        spent = torch.zeros(len(clients), dtype=torch.float64)
        spent[place[: len(self.clients)]] = self.spent
        now = torch.zeros(len(clients), dtype=torch.float64)
        now.index_add_(0, torch.searchsorted(clients, who), inverse[t - when])
        return Ledger(t + 1, clients, spent + now.square() * factor, who, when)

    def most(self) -> float:
        """Return what the client that has spent most has."""
        return float(self.spent.max()) if len(self.spent) else 0.0


class Private(NamedTuple):
    """An algorithm's state, the key of the noise, the norm, z, and who took part."""

    state: Any
    key: Key
    norm: float
    multiplier: float
    ledger: Ledger


def private(algorithm: Algorithm, mechanism: Mechanism, rounds: int) -> Algorithm:
    """Return an algorithm of one phase, in which clients send their models and nothing else, with noise, for so many rounds.

    In ``rounds.parquet`` are "noise_std" of each number of the model and, where it changes, "clip_norm".
    """
    (phase,) = algorithm.phases
    hidden = replace(phase, uplink=(mechanism.clip, *phase.uplink))
    inverse = inverted(mechanism.mixing, rounds)

    def init(z: Tree, key: Key, problem: Any) -> Private:
        hiding = rng.fold(key, "privacy"), mechanism.norm, mechanism.multiplier, Ledger.nothing()
        return Private(algorithm.init(z, key, problem), *hiding)

    def round(at: Private, rnd: Round) -> tuple[Private, Mapping[str, float]]:
        noising = _Noising(rnd, hidden, mechanism, at, inverse)
        state, metrics = algorithm.round(at.state, cast(Round, noising))  # the rest of it is the round's own
        return noising.at._replace(state=state), {**metrics, **noising.metrics}

    result = beneath(algorithm, lambda at: at.state)
    return result._replace(init=init, round=round, phases=(hidden,))


def hiding(state: Any) -> Private:
    """Return what is remembered of hiding clients in the state of an algorithm, which may be wrapped once more."""
    return layer(state, Private)


def mixing(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of sqrt(1 - x), those of the inverse of the matrix of partial sums' square root."""
    result = [1.0]
    for j in range(1, bands):
        result.append(result[-1] * (j - 1.5) / j)
    return tuple(result)


def inverted(mixing: tuple[float, ...], most: int) -> Tensor:
    """Return the coefficients c (T,) float64 of 1 / sum_j mixing[j] x^j, (1,) where that is 1."""
    if len(mixing) == 1:
        return torch.ones(1, dtype=torch.float64)
    result = [1.0]
    for t in range(1, most):
        result.append(-sum(mixing[j] * result[t - j] for j in range(1, min(t + 1, len(mixing)))))
    return torch.tensor(result, dtype=torch.float64)


class _Noising(Around):
    """A round whose exchange yields what is safe to tell."""

    def __init__(self, rnd: Round, phase: Phase, mechanism: Mechanism, at: Private, inverse: Tensor):
        super().__init__(rnd)
        self._phase, self._mechanism, self._inverse = phase, mechanism, inverse
        self.at, self.metrics = at, dict[str, float]()
        self._asked = Asked(mechanism.invites, "privacy")

    def invite(self, size: int, **given: Any) -> Cohort:
        """Do as the round does. Raises FedfleetError where more may be asked, or more often, than is reckoned with."""
        return self._asked.invite(self._round, size, **given)

    def buffered(self, phase: Phase, **given: Any) -> Any:
        """Raises FedfleetError: nothing hides these answers."""
        raise FedfleetError("answers are asked for one by one, and noise is reckoned for the sum of a cohort's")

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Do as the round does, and add noise. Raises FedfleetError where that would not hide all."""
        if self.metrics:
            raise FedfleetError("clients are asked twice in a round, and noise is reckoned for one exchange")
        m, before = self._mechanism, self.at
        self._asked.check(cohort)
        told: dict[str, Any] = {}
        if m.follows is not None:  # a tensor, so that blocks that have been captured serve every norm
            told[m.follows.sent] = torch.tensor(before.norm, dtype=torch.float64)
        if m.shares is not None:
            told[m.sent] = before.multiplier / math.sqrt(m.shares)
        shared = replace(shared, config={**shared.config, **told})
        slot = self._phase.model
        assert slot is not None
        origin = shared.send[slot]
        try:
            result = self._round.map_reduce(
                self._phase, shared=shared, cohort=cohort, client_input=client_input, steps=steps
            )
        except TooFewResponses:
            if not m.empty:
                raise
            none = torch.zeros(0, dtype=torch.int64)
            result = Reduced({slot: origin}, none, {}, none.double())
        if result.config.keys() - {m.follows and m.follows.told}:
            raise FedfleetError(f"clients send {', '.join(result.config)} besides their models, which nothing hides")
        heard = len(result.received)
        whole = float(heard if m.divide_by is None else m.divide_by)
        multiplier = before.multiplier if m.follows is None else m.follows.of_messages(before.multiplier)
        std, factor = multiplier * before.norm / whole, 1.0 if m.shares is None else m.shares / heard
        value = self._hidden(result[slot], origin, heard / whole, std if m.shares is None else 0.0)
        self.metrics["noise_std"] = std / math.sqrt(factor)
        norm = before.norm
        if m.follows is not None:
            self.metrics["clip_norm"] = norm
            norm *= math.exp(-m.follows.lr * (self._within(result, m.follows, whole) - m.follows.quantile))
        ledger = before.ledger.after(result.received, self._inverse, factor)
        self.at = before._replace(norm=norm, ledger=ledger)
        if m.empty:
            return Reduced({slot: value}, torch.zeros(0, dtype=torch.int64), {}, torch.zeros(0, dtype=torch.float64))
        return result._replace(values={slot: value})

    def _hidden(self, value: Tree, origin: Tree, share: float, std: float) -> Tree:
        """Return the model that is a share of the way from ``origin`` to ``value``, with noise."""
        leaves = []
        for (name, start), leaf in zip(T.named_leaves(origin), T.leaves(value), strict=True):
            moved = (leaf - start) * share
            leaves.append(start + (moved + self._noise(name, leaf) * std if std else moved))
        return T.unflatten(value, leaves)

    def _noise(self, name: str, like: Tensor) -> Tensor:
        """Return this exchange's noise of a leaf, of which earlier exchanges' draws are a part where it is correlated."""
        t, result = self.at.ledger.exchanges, torch.zeros_like(like)
        for j, weight in enumerate(self._mechanism.mixing[: t + 1]):
            key = rng.fold(self.at.key, "noise", t - j, name)
            result += weight * normals(key, tuple(like.shape)).to(like.dtype)
        return result

    def _within(self, result: Reduced, follows: Adaptive, whole: float) -> float:
        """Return the share of clients whose messages were within the norm, with noise."""
        drawn = rng.normal(rng.fold(self.at.key, "within", self.at.ledger.exchanges), (), torch.float64)
        told = result.config.get(follows.told, torch.zeros(0))  # nobody tells where nobody was heard
        return 0.5 + float((told - 0.5).sum() + follows.count_noise * drawn) / whole
