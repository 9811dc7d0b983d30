"""Rules that bear clients that attack, in the place of the mean of any algorithm that averages models or differences.

    median            coordinate by coordinate (Yin, Chen, Ramchandran & Bartlett, "Byzantine-robust distributed learning: towards
                      optimal statistical rates", ICML 2018)
    trimmed_mean      the mean of each coordinate without the f largest and smallest (ibid.)
    krum, multi_krum  the update, or the mean of so many, nearest its S - f - 2 nearest others (Blanchard, El Mhamdi, Guerraoui &
                      Stainer, NIPS 2017)
    geometric_median  RFA: what the weighted sum of distances is least to, by the smoothed Weiszfeld algorithm (Pillutla, Kakade &
                      Harchaoui, "Robust aggregation for federated learning", IEEE TSP 2022, Algorithm 2)
    norm_bound        the mean of updates that are cut to a norm (Sun, Kairouz, Suresh & McMahan, "Can you really backdoor federated
                      learning?", 2019)
    foolsgold         the mean, in which clients count the less the more all that they have sent is like another's (Fung, Yoon &
                      Beschastnikh, "The limitations of federated learning in Sybil settings", RAID 2020, Algorithm 1)
    fltrust           the mean of updates as long as the server's own, which it has learnt from examples of its own as a client
                      does, each as much as it points the same way (Cao, Fang, Liu & Gong, "FLTrust: Byzantine-robust federated
                      learning via trust bootstrapping", NDSS 2021, Algorithm 2)
    bucket            before any of these but the last two: means of so many updates drawn together (Karimireddy, He & Jaggi,
                      "Byzantine-robust learning on heterogeneous datasets via bucketing", ICLR 2022, Algorithm 1)

f = floor(byzantine S) of S answers; of buckets, too, any f of which may have an attacker. Krum's theorem asks for 2f + 2 < S,
which is not demanded: there have to be 2f < S and a nearest other. Median, trimmed mean and Krum take clients as alike, the
others weigh them as ``of`` does, also in a bucket, which weighs what they do together; in the paper all weigh the same. A geometric
median's nu is in the paper an absolute number, too. Norms are bounded without the noise that Sun et al. add. FoolsGold compares
those heard in an exchange, with kappa = 1; its weighted sum is a mean here, so that the step is not longer the more clients
there are, and its importance of features is left out. FLTrust takes clients as alike but for their trust; its alpha is the
server's rate of ``of``, and where nobody is trusted, of which the paper says nothing, the model does not move.
What layers count is aggregated coordinate by coordinate under median and trimmed mean, else averaged as updates are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions, refuse_others
from fedfleet.algorithms.robust_rules import finite, foolsgold, geometric_median, norm_bound, trust
from fedfleet.algorithms.wrapping import Exchange, WrapperOptions, instead, ruled, stored, wrapped
from fedfleet.simulator.author import (
    Algorithm,
    ConfigError,
    Key,
    Mean,
    Problem,
    Round,
    T,
    Task,
    Tree,
    UploadMatrix,
    beneath,
    krum_shares,
    rng,
    trainable,
)

NAME = "robust"
REMEMBERED = 1 << 28
"""Floats of all clients' histories that FoolsGold keeps at most."""
RuleName = Literal[
    "mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_bound", "foolsgold", "fltrust"
]


class RobustOptions(WrapperOptions):
    """Options of a robust rule."""

    rule: RuleName = "median"
    """What takes the mean's place; mean: nothing does."""
    byzantine: float = Field(default=0.2, ge=0, lt=0.5)
    """Share of the answers that may be attackers': what a trimmed mean cuts on each side, and Krum does not count on."""
    keep: int | None = Field(default=None, ge=1)
    """Updates that Multi-Krum averages; all but the attackers' share if not given."""
    updates: int = Field(default=3, ge=1)
    """Steps of the search for the geometric median."""
    nu: float = Field(default=1e-6, gt=0)
    """Least distance that it divides by."""
    bound: Literal["median"] | float = Field(default="median")
    """Longest that an update may be, in the Euclidean norm; median: as the middle one of those heard."""
    bucket: int = Field(default=1, ge=1)
    """Updates that are averaged before the rule sees them; 1: none."""

    @model_validator(mode="after")
    def _applies(self) -> RobustOptions:
        every = frozenset().union(*(rule.options for rule in RULES.values()))
        refuse_others(self, f"rule={self.rule}", RULES[self.rule].options, every)
        if self.bound != "median" and not self.bound > 0:
            raise ValueError(f"bound={self.bound:g}: an update has to be of some length: give a number above 0")
        return self

    def attackers(self, answers: int) -> int:
        """Return f of so many answers."""
        return int(self.byzantine * answers + 1e-9)  # 0.29 * 100 is a little less than 29

    def seen(self, answers: int) -> int:
        """Return how many updates the rule sees of so many answers."""
        return math.ceil(answers / self.bucket)

    def kept(self, answers: int) -> int:
        """Return how many updates Krum's rules average."""
        if self.rule == "krum":
            return 1
        return self.keep or max(1, self.seen(answers) - self.attackers(answers))

    def enough(self, answers: int) -> bool:
        """Say whether the rule exists for so many answers, and attackers may not be in half of what it sees."""
        return RULES[self.rule].enough(self, answers)


def robust(options: RobustOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build an algorithm with a robust rule in the place of its mean. Raises ConfigError where there may be too few answers."""
    inner = wrapped(options, task, cohort, "a robust rule")
    few = [n for n in range(cohort.min_responses, max(cohort.size, cohort.min_responses) + 1) if not options.enough(n)]
    if few:
        raise ConfigError(
            f"algorithm.rule={options.rule!r}: of {few[-1]} answers it sees {options.seen(few[-1])} updates and leaves "
            f"{options.attackers(few[-1])} out of account, which is too few: raise cohort.min_responses above that, and "
            f"cohort.size, or lower algorithm.byzantine, algorithm.bucket or algorithm.keep"
        )
    most = max(cohort.size, cohort.min_responses)
    if options.keep is not None and options.keep > (honest := options.seen(most) - options.attackers(most)):
        raise ConfigError(
            f"algorithm.keep={options.keep}: of the {options.seen(most)} updates that it sees of {most} answers, "
            f"{options.attackers(most)} may be attackers', whom it would average, too: lower it to {honest}, or lower "
            f"algorithm.byzantine"
        )
    return RULES[options.rule].build(options, inner)


def aggregated(o: RobustOptions, given: Exchange) -> Tree:
    """Return the model, or the difference, that a rule makes of what was sent alone. Raises ValueError of another rule."""
    rule, answers = RULES[o.rule], len(given.uploads.weight)
    if rule.of is None:
        raise ValueError(f"the rule {o.rule!r} needs more than what was sent")
    if not o.enough(answers):  # which is so in trials on two clients alone
        return given.moved(given.shares, given.shares)
    if o.bucket > 1:
        order = rng.permutation(rng.fold(given.key, "buckets"), answers)
        given = given._replace(uploads=given.uploads.grouped(order.split(o.bucket), weighted=rule.weighted))
    return rule.of(o, answers, given)


def _median(o: RobustOptions, answers: int, given: Exchange) -> Tree:
    return given.uploads.median()


def _trimmed_mean(o: RobustOptions, answers: int, given: Exchange) -> Tree:
    return given.uploads.trimmed_mean(o.attackers(answers) / o.seen(answers))


def _krum(o: RobustOptions, answers: int, given: Exchange) -> Tree:
    counts = krum_shares(given.gram(), o.attackers(answers), o.kept(answers))
    return given.moved(counts, counts)


def _geometric_median(o: RobustOptions, answers: int, given: Exchange) -> Tree:
    counts = geometric_median(given.gram(), given.shares, o.updates, o.nu)
    return given.moved(counts, counts)


def _norm_bound(o: RobustOptions, answers: int, given: Exchange) -> Tree:
    uploads, start = given.trainable
    norms = uploads.norms(start)
    bound = float(norms.nan_to_num(math.inf, math.inf).quantile(0.5)) if o.bound == "median" else o.bound
    return given.moved(given.shares * norm_bound(norms, bound), given.without(norms.isfinite()))


class Remembered(NamedTuple):
    """An algorithm's state, and the sum of all that each client's model has moved by (N, d) float32."""

    state: Any
    history: Tensor


def _remembering(inner: Algorithm) -> Algorithm:
    """Return an algorithm with FoolsGold in the place of its mean; histories are part of the server's state."""
    phases = stored(inner)

    def init(z: Tree, key: Key, problem: Problem) -> Remembered:
        floats = T.count(trainable(z))
        if problem.clients * floats > REMEMBERED:
            raise ConfigError(
                f"algorithm.rule='foolsgold': the histories of {problem.clients:,} clients of {floats:,} floats each are too "
                f"large for the server's state, which may hold {REMEMBERED:,}: lower population.clients, or choose another rule"
            )
        return Remembered(inner.init(z, key, problem), torch.zeros(problem.clients, floats))

    def round(at: Remembered, rnd: Round) -> tuple[Remembered, Mapping[str, float]]:
        history = at.history.clone()

        def rule(given: Exchange) -> Tree:
            uploads, start = given.trainable
            place = 0
            for _, here, tile in uploads.tiles(start):
                stop = place + here.stop - here.start
                history[:, place:stop].index_add_(0, given.received, tile.to("cpu", history.dtype))
                place = stop
            gram = UploadMatrix((history[given.received],), (given.shares,)).gram()
            counts = given.shares * foolsgold(gram)
            total = counts.sum()
            return given.moved(counts / total if total > 0 else counts, given.without(finite(gram)))

        state, metrics = inner.round(at.state, ruled(rnd, phases, rule))
        return Remembered(state, history), metrics

    made = beneath(inner, lambda at: at.state)
    return made._replace(init=init, round=round, phases=tuple(phases.values()), name=NAME)


class Trusting(NamedTuple):
    """An algorithm's state, and by phase what the server keeps of its own work where clients keep a state."""

    state: Any
    client_state: Mapping[str, Tree]


def _trusting(inner: Algorithm, name: str) -> Algorithm:
    """Return an algorithm with FLTrust in the place of its mean. Raises ConfigError where the server cannot do clients' work."""
    phases = stored(inner)
    models = {p.name: slot for p in inner.phases if (slot := p.model or p.difference)}
    mine = {
        p.name: replace(p, name=f"root_{p.name}", reduce={slot: Mean(weighted=False) for slot in p.reduce})
        for p in inner.phases
        if p.name in models
    }
    if any(stage.batches.held_out for p in mine.values() for stage in p.work.loops):
        raise ConfigError(
            f"algorithm.of={name!r}: its clients hold out examples to measure models on, and the server has none but those it "
            f"learns from: choose fedavg, or another rule"
        )

    def round(at: Trusting, rnd: Round) -> tuple[Trusting, Mapping[str, float]]:
        client_state, trusted = dict(at.client_state), []

        def rule(given: Exchange) -> Tree:
            phase, shared, client_input, steps = given.asked
            if client_input is not None:
                raise ConfigError(
                    f"algorithm.of={name!r}: each of its clients is sent something of its own, which the server has not: choose "
                    f"fedavg, or another rule"
                )
            done = rnd.at_server(mine[phase], shared=shared, client_state=client_state.get(phase), steps=steps)
            if done.client_state is not None:
                client_state[phase] = done.client_state
            root = trainable(done.values[models[phase]])
            counts, scores = _trusted(given, root)
            trusted.append(float((scores > 0).double().mean()))
            return given.moved(counts, scores if scores.any() else None)

        state, metrics = inner.round(at.state, ruled(rnd, phases, rule))
        return Trusting(state, client_state), {**metrics, "trusted": sum(trusted) / max(1, len(trusted))}

    return beneath(inner, lambda at: at.state)._replace(
        init=lambda z, key, problem: Trusting(inner.init(z, key, problem), {}),
        round=round,
        phases=tuple(phases.values()),
        server=tuple(mine.values()),
        name=NAME,
    )


def _trusted(given: Exchange, root: Tree) -> tuple[Tensor, Tensor]:
    """Return what updates are multiplied by (S,), and their trust scores (S,), whose sum is 1 unless nobody is trusted."""
    uploads, start = given.trainable
    moved = root if start is None else T.map(lambda x, z: x.double() - z.double(), root, start)
    norms, length = uploads.norms(start), float(T.norm(moved))
    scores = trust(uploads.products(moved, start), norms, length)
    if scores.any():
        scores = scores / scores.sum()
    return scores * torch.where(norms > 0, length / norms, 0.0), scores


def _always(o: RobustOptions, answers: int) -> bool:
    return True


def _fewer_than_half(o: RobustOptions, answers: int) -> bool:
    return 2 * o.attackers(answers) < o.seen(answers)


def _has_neighbours(o: RobustOptions, answers: int) -> bool:
    seen = o.seen(answers)
    return _fewer_than_half(o, answers) and seen - o.attackers(answers) >= 3 and o.kept(answers) <= seen


def _in_place(o: RobustOptions, inner: Algorithm) -> Algorithm:
    return instead(inner, NAME, lambda given: aggregated(o, given))


class Rule(NamedTuple):
    """A rule in the place of an algorithm's mean.

    Attributes:
        of: ``(options, answers, exchange) -> tree``: the model, or the difference, of what was sent alone. It sees buckets where
            there are some. None for a rule that needs more, which ``build`` knows.
        options: names of the options that it reads.
        enough: ``(options, answers) -> bool``: whether the rule exists for so many answers.
        weighted: whether it weighs clients as ``of`` in the options does; then a bucket does, too.
        build: ``(options, inner) -> algorithm`` with the rule.

    """

    of: Callable[[RobustOptions, int, Exchange], Tree] | None = None
    options: frozenset[str] = frozenset()
    enough: Callable[[RobustOptions, int], bool] = _always
    weighted: bool = False
    build: Callable[[RobustOptions, Algorithm], Algorithm] = _in_place


RULES: Mapping[RuleName, Rule] = {
    "mean": Rule(build=lambda o, inner: inner),
    "median": Rule(_median, frozenset({"bucket"})),
    "trimmed_mean": Rule(_trimmed_mean, frozenset({"bucket", "byzantine"}), _fewer_than_half),
    "krum": Rule(_krum, frozenset({"bucket", "byzantine"}), _has_neighbours),
    "multi_krum": Rule(_krum, frozenset({"bucket", "byzantine", "keep"}), _has_neighbours),
    "geometric_median": Rule(_geometric_median, frozenset({"bucket", "updates", "nu"}), weighted=True),
    "norm_bound": Rule(_norm_bound, frozenset({"bucket", "bound"}), weighted=True),
    "foolsgold": Rule(build=lambda o, inner: _remembering(inner)),
    "fltrust": Rule(build=lambda o, inner: _trusting(inner, o.of.name)),
}
"""All rules by name. One more is a row here, and its name in ``RuleName``."""
