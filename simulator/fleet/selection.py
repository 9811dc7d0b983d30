"""Client selection: whom the server invites.

A selection is a set of pure functions over a state that the engine keeps and commits with the round. An aborted
attempt leaves nothing that was learnt in it. All of it is vectorised. The state covers the clients that have taken
part, not all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.errors import ConfigError


class Completed(NamedTuple):
    """What the server learns of the clients heard in a phase: numbers (R,), mean training loss, seconds, examples (R,)."""

    round: int
    clients: Tensor
    loss: Tensor
    seconds: Tensor
    examples: Tensor


class Selection(Protocol):
    """Draws cohorts. ``feedback`` says whether it learns from losses, one number a heard client."""

    @property
    def feedback(self) -> bool:
        """Whether ``observe`` does anything."""
        ...

    def init(self) -> Any:
        """Return the state before the first round."""
        ...

    def invite(self, state: Any, key: Key, size: int, problem: Problem, *, replace: bool) -> tuple[Tensor, Any]:
        """Return the invited clients (S,) int64 and the new state. Raises ConfigError where it cannot draw with replacement."""
        ...

    def observe(self, state: Any, completed: Completed) -> Any:
        """Return the state after a phase."""
        ...


def _refuse_replacement(kind: str, replace: bool) -> None:
    if replace:
        raise ConfigError(
            f"selection.kind={kind!r}: the algorithm invites with replacement, and this selection never invites a client twice: "
            f"use uniform or examples"
        )


class _Memoryless:
    feedback = False

    def init(self) -> None:
        """Return no state."""

    def observe(self, state: Any, completed: Completed) -> Any:
        """Learn nothing."""
        return state


@dataclass(frozen=True)
class Uniform(_Memoryless):
    """Every client alike, without replacement unless the algorithm asks for it."""

    def invite(self, state: None, key: Key, size: int, problem: Problem, *, replace: bool) -> tuple[Tensor, None]:
        """Draw in O(size), however many clients there are."""
        return rng.sample(key, problem.clients, size, replace=replace), None


@dataclass(frozen=True)
class Poisson(_Memoryless):
    """Each client for itself, with one probability, so that as many as were asked for are invited in the mean."""

    def invite(self, state: None, key: Key, size: int, problem: Problem, *, replace: bool) -> tuple[Tensor, None]:
        """Draw in O(N). Raises ConfigError where one may be invited twice."""
        _refuse_replacement("poisson", replace)
        drawn = rng.uniform(key, problem.clients, torch.float64)
        return (drawn < size / problem.clients).nonzero().flatten(), None


@dataclass(frozen=True)
class ByExamples(_Memoryless):
    """In proportion to their numbers of examples: one after the other without replacement, or independently with it."""

    def invite(self, state: None, key: Key, size: int, problem: Problem, *, replace: bool) -> tuple[Tensor, None]:
        """Draw in O(N)."""
        weights = _examples(problem, torch.arange(problem.clients)).to(torch.float64)
        return _weighted(key, weights, size, replace=replace), None


@dataclass(frozen=True)
class RoundRobin:
    """One after the other in a random order, a run's own, so that every client is invited equally often.

    Those whose attempt at a round was aborted have had their turn, or with ``again`` have it once more: then nobody is heard
    more often than rounds that counted come round to it.
    """

    seed: int = 0
    again: bool = False
    feedback = False

    def init(self) -> Tensor:
        """Return how many have been invited so far."""
        return torch.zeros((), dtype=torch.int64)

    def invite(self, state: Tensor, key: Key, size: int, problem: Problem, *, replace: bool) -> tuple[Tensor, Tensor]:
        """Take the next ones. Raises ConfigError where one may be invited twice."""
        _refuse_replacement("round_robin", replace)
        return _order(self.seed, problem.clients)[(state + torch.arange(size)) % problem.clients], state + size

    def observe(self, state: Tensor, completed: Completed) -> Tensor:
        """Learn nothing."""
        return state


@lru_cache(maxsize=1)
def _order(seed: int, clients: int) -> Tensor:
    return rng.permutation(rng.fold(rng.key(seed), "round robin"), clients)


class Known(NamedTuple):
    """What is known of the clients heard so far: numbers (M,) ascending, and a column (M,) float64 a quantity."""

    clients: Tensor
    columns: Mapping[str, Tensor]

    @staticmethod
    def nothing(*names: str) -> Known:
        """Return the table without rows."""
        return Known(torch.zeros(0, dtype=torch.int64), {n: torch.zeros(0, dtype=torch.float64) for n in names})

    def updated(self, clients: Tensor, columns: Mapping[str, Tensor]) -> Known:
        """Return the table with these rows entered; of a client given twice the later row counts."""
        both = torch.cat([self.clients, clients])
        result, inverse = both.unique(return_inverse=True)
        latest = torch.zeros(len(result), dtype=torch.int64).scatter_reduce_(
            0, inverse, torch.arange(len(both)), "amax"
        )
        return Known(result, {k: torch.cat([v, columns[k].to(torch.float64)])[latest] for k, v in self.columns.items()})

    def get(self, name: str, clients: Tensor, default: float) -> Tensor:
        """Return a column for clients (S,), ``default`` for unknown ones."""
        result = torch.full(clients.shape, default, dtype=torch.float64)
        if len(self.clients):
            place = torch.searchsorted(self.clients, clients).clamp(max=len(self.clients) - 1)
            known = self.clients[place] == clients
            result[known] = self.columns[name][place[known]]
        return result


@dataclass(frozen=True)
class PowerOfChoice:
    """Of ``factor * size`` candidates drawn by their examples, those with the largest loss when last heard.

    This is rpow-d of Cho, Wang & Joshi (2020), section 5, the variant that sends nothing extra: a client never heard counts
    as having an infinite loss.
    """

    factor: float = 2.0
    feedback = True

    def init(self) -> Known:
        """Know nobody."""
        return Known.nothing("loss")

    def invite(self, state: Known, key: Key, size: int, problem: Problem, *, replace: bool) -> tuple[Tensor, Known]:
        """Draw candidates and take those of the largest loss. Raises ConfigError where one may be invited twice."""
        _refuse_replacement("power_of_choice", replace)
        candidates, _ = ByExamples().invite(
            None, key, min(problem.clients, math.ceil(self.factor * size)), problem, replace=False
        )
        loss = state.get("loss", candidates, math.inf)
        return candidates[loss.argsort(descending=True, stable=True)[:size]], state

    def observe(self, state: Known, completed: Completed) -> Known:
        """Remember the losses."""
        return state.updated(completed.clients, {"loss": completed.loss})


@dataclass(frozen=True)
class Oort:
    """Utility-guided selection after Oort (Lai et al., OSDI 2021), simplified as said here.

    A known client's utility is examples * mean loss (the paper takes the root mean square of the examples' losses), clipped
    at the 95th percentile, scaled to [0, 1], plus sqrt(0.1 log(t) / round it was last heard), times (T / seconds)^penalty
    where it takes longer than T, the ``pace`` quantile of the known seconds. A share of the cohort, ``explore`` at first
    and ``decay`` times as much each round down to ``explore_least``, goes to clients never heard, drawn uniformly. The
    others are drawn in proportion to utility among those with at least ``cutoff`` times that of the last one needed.
    """

    explore: float = 0.9
    explore_least: float = 0.2
    decay: float = 0.98
    penalty: float = 2.0
    pace: float = 0.5
    cutoff: float = 0.95
    feedback = True

    def init(self) -> tuple[Known, int]:
        """Know nobody, at round 1."""
        return Known.nothing("utility", "seconds", "round"), 1

    def invite(
        self, state: tuple[Known, int], key: Key, size: int, problem: Problem, *, replace: bool
    ) -> tuple[Tensor, tuple[Known, int]]:
        """Exploit what is known, and explore. Raises ConfigError where one may be invited twice."""
        _refuse_replacement("oort", replace)
        known, t = state
        unknown = problem.clients - len(known.clients)
        wanted = math.floor(max(self.explore_least, self.explore * self.decay ** (t - 1)) * size)
        exploit = min(size - min(wanted, unknown), len(known.clients))
        parts = [self._exploit(known, t, rng.fold(key, "exploit"), exploit)] if exploit else []
        if exploit < size:
            # A uniform draw of the never heard: a uniform draw of all, large enough, without the known.
            drawn = rng.sample(
                rng.fold(key, "explore"), problem.clients, min(problem.clients, size + len(known.clients))
            )
            parts.append(drawn[~torch.isin(drawn, known.clients)][: size - exploit])
        return torch.cat(parts), state

    def _exploit(self, known: Known, t: int, key: Key, size: int) -> Tensor:
        raw, seconds, last = (known.columns[k] for k in ("utility", "seconds", "round"))
        clipped = raw.minimum(raw.quantile(0.95))
        spread = (clipped.max() - clipped.min()).clamp(min=1e-12)
        utility = (clipped - clipped.min()) / spread + (0.1 * math.log(max(t, 2)) / last).sqrt()
        preferred = seconds.quantile(self.pace)
        utility = utility * torch.where(seconds > preferred, (preferred / seconds) ** self.penalty, 1.0)
        least = self.cutoff * utility.topk(size).values[-1]
        return known.clients[_weighted(key, torch.where(utility >= least, utility, 0.0), size, replace=False)]

    def observe(self, state: tuple[Known, int], completed: Completed) -> tuple[Known, int]:
        """Remember utility, seconds and round."""
        known, _ = state
        columns = {
            "utility": completed.examples * completed.loss.abs(),
            "seconds": completed.seconds,
            "round": torch.full(completed.clients.shape, float(completed.round + 1)),
        }
        return known.updated(completed.clients, columns), completed.round + 2


class Tiers(NamedTuple):
    """Clients invited so far, losses and seconds, cohorts drawn from tiers, and each tier's chance and credit (T,)."""

    invited: Tensor
    known: Known
    drawn: int
    chance: Tensor
    credit: Tensor


@dataclass(frozen=True)
class Tifl:
    """Cohorts of clients that are as fast, after TiFL (Chai et al., HPDC 2020), as FLGo has it, simplified as said here.

    At first all clients are invited once, in a random order, a run's own. Then they are cut into ``tiers`` of one size by their
    seconds when last heard, those never heard in the last; one tier is drawn, and the cohort uniformly in it. After every
    ``interval`` cohorts the n tiers with credit left get the chances n, n - 1, ..., 1 over n (n + 1) / 2, by falling mean loss of
    their clients when last heard (the paper: by rising accuracy on test examples of the tier). Each cohort costs a tier one
    credit; where none is left all have ``credits`` anew.
    """

    seed: int = 0
    tiers: int = 5
    interval: int = 10
    credits: int | None = None
    feedback = True

    def init(self) -> Tiers:
        """Know nobody."""
        even = torch.full((self.tiers,), 1 / self.tiers, dtype=torch.float64)
        none = torch.zeros((), dtype=torch.int64)
        return Tiers(none, Known.nothing("loss", "seconds"), 0, even, self._full())

    def _full(self) -> Tensor:
        return torch.full((self.tiers,), math.inf if self.credits is None else self.credits, dtype=torch.float64)

    def invite(self, state: Tiers, key: Key, size: int, problem: Problem, *, replace: bool) -> tuple[Tensor, Tiers]:
        """Invite those not invited yet, or some of a tier. Raises ConfigError where one may be invited twice."""
        _refuse_replacement("tifl", replace)
        if state.invited < problem.clients:
            turn = (state.invited + torch.arange(size)) % problem.clients
            return _order(self.seed, problem.clients)[turn], state._replace(invited=state.invited + size)
        tiers = self._tiers(state.known, problem)
        if state.drawn and state.drawn % self.interval == 0:
            state = state._replace(chance=self._chances(state, tiers))
        if not bool(((state.credit > 0) & (state.chance > 0)).any()):  # those with credit left had none before
            state = state._replace(chance=self._chances(state, tiers))
        chance, credit = torch.where(state.credit > 0, state.chance, 0.0), state.credit.clone()
        tier = int(_weighted(rng.fold(key, "tier"), chance, 1, replace=True))
        credit[tier] -= 1
        credit = credit if bool((credit > 0).any()) else self._full()
        chosen = rng.sample(rng.fold(key, "clients"), len(tiers[tier]), size)
        return tiers[tier][chosen], state._replace(drawn=state.drawn + 1, credit=credit)

    def _tiers(self, known: Known, problem: Problem) -> tuple[Tensor, ...]:
        """Return the clients of each tier, the fastest first."""
        seconds = known.get("seconds", torch.arange(problem.clients), math.inf)
        return seconds.argsort(stable=True).tensor_split(self.tiers)

    def _chances(self, state: Tiers, tiers: tuple[Tensor, ...]) -> Tensor:
        """Return the tiers' chances (T,) by their losses, 0 of those without credit."""
        loss = torch.stack(
            [state.known.get("loss", clients, math.nan).nanmean().nan_to_num(-math.inf) for clients in tiers]
        )
        loss = torch.where(state.credit > 0, loss, -math.inf)
        n = int((state.credit > 0).sum())
        places = torch.arange(n, 0, -1, dtype=torch.float64) / (n * (n + 1) / 2)
        return torch.zeros_like(loss).index_copy(0, loss.argsort(descending=True, stable=True)[:n], places)

    def observe(self, state: Tiers, completed: Completed) -> Tiers:
        """Remember losses and seconds."""
        return state._replace(
            known=state.known.updated(completed.clients, {"loss": completed.loss, "seconds": completed.seconds})
        )


def _examples(problem: Problem, clients: Tensor) -> Tensor:
    return torch.ones_like(clients) if problem.num_examples is None else problem.num_examples(clients)


def _weighted(key: Key, weights: Tensor, size: int, *, replace: bool) -> Tensor:
    """Draw positions in proportion to ``weights`` (N,), without replacement one after the other (exponential clocks)."""
    if replace:
        u = rng.uniform(key, size, torch.float64)
        return torch.searchsorted(weights.cumsum(0), u * weights.sum(), right=True).clamp(max=len(weights) - 1)
    clocks = -torch.log1p(-rng.uniform(rng.fold(key, torch.arange(len(weights))), (), torch.float64)) / weights
    return clocks.topk(size, largest=False, sorted=True).indices


def occurrences(clients: Tensor) -> Tensor:
    """Number repeated clients 0, 1, ... in order of appearance."""
    order = clients.argsort(stable=True)
    ordered = clients[order]
    first = torch.searchsorted(ordered, ordered)
    return torch.empty_like(clients).scatter_(0, order, torch.arange(len(clients)) - first)
