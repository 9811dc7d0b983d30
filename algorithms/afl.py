"""AFL: the model that does best on the worst mixture of domains.

Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019: Stochastic-AFL, Figures 3 and 4. In the cross-device form the
domains are made up of clients, of which some take part; with a client a domain and all of them invited it is the paper's.
The optimistic and the strongly convex variants are reconstructions of what the paper's appendix announces.

    paper                     here
    w_t                       z
    lambda_t, gamma_lambda    state.mixture, dual.lr; see mixture.py
    gamma_w                   lr, of optimizer
    m_k, m_bar                problem.domains.examples, and their shares
    PerDomain, Weighted       gradient: per_domain, weighted
    w^A, lambda^A             state.z_mean, state.mixture_mean
    W, Phi_W                  radius, mirror; see mirror.py

A round, both gradients at (w_{t-1}, lambda_{t-1}):

    w_t      = Proj_W(w_{t-1} - gamma_w g_w)                 g_w      estimates sum_k lambda_k grad L_k
    lambda_t = Proj(lambda_{t-1} + gamma_lambda g_lambda)    g_lambda estimates (L_1, ..., L_p)

    per_domain  a uniform cohort; client i of domain k sends its gradient times lambda_k n_i / m_k, and its loss
    weighted    domains drawn from lambda, in each a client by examples; a second cohort sends losses
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms import lambda_sets
from fedfleet.algorithms.afl_theory import AflTheory
from fedfleet.algorithms.agnostic import (
    by_shares,
    estimated,
    learnt,
    loss_at_z,
    of_problem,
    share_of,
    weighted_gradient,
)
from fedfleet.algorithms.domain_participation import DomainCorrection, Remembered, differing, nothing_sent
from fedfleet.algorithms.mirror import Ball
from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.algorithms.options import ClientOptimizer, CohortOptions, Options, Schedule
from fedfleet.simulator.author import (
    Algorithm,
    BatchPlan,
    ByDomainMean,
    ConfigError,
    Key,
    Message,
    Phase,
    Problem,
    Reduced,
    Round,
    Saddle,
    T,
    Task,
    Total,
    Tree,
    View,
)


class AflOptions(Options):
    """Options of AFL."""

    lr: float = Field(default=0.1, gt=0)
    """Step of the model, gamma_w."""
    lr_schedule: Schedule = Schedule()
    optimizer: ClientOptimizer = ClientOptimizer()
    """The rule of the server's step."""
    dual: DualOptions = DualOptions()
    batch_size: int | None = Field(default=10, ge=1)
    """Examples of a client in a gradient; null: all it has."""
    steps: int = Field(default=1, ge=1)
    """Local steps: 1 is AFL; more give FedAvg with the weights lambda."""
    local_lr: float | None = Field(default=None, gt=0)
    """Step of the local steps; ``lr`` if not given."""
    gradient: Literal["per_domain", "weighted"] = "per_domain"
    """Figure 4: who sends gradients."""
    dual_gradient: Literal["per_domain", "single"] = "per_domain"
    """Figure 4: losses of a uniform cohort; or of one client a domain, in domains drawn uniformly."""
    estimator: Literal["horvitz_thompson", "ratio"] = "horvitz_thompson"
    """What answers of some clients say of all: sums, unbiased where all are as likely to be heard, or with ``correction``; or
    shares of those heard, of less variance and biased: in lambda too, unless clients of one domain are heard as often."""
    correction: DomainCorrection = DomainCorrection()
    """Correction for clients that are heard less often than others, for the model and for lambda. Without it, lambda follows
    who is heard, too, and does not say which domains are hard."""
    method: Literal["plain", "optimistic", "two_sequence", "best_response"] = "plain"
    """optimistic: steps along twice the gradient minus the last one; two_sequence: the same with the points that were played
    beside, which is the same where nothing is projected; best_response: lambda is the worst mixture for the losses of all domains
    on all their examples, so every client is asked, and lr is 1 / (strong_convexity t) if that is given."""
    strong_convexity: float | None = Field(default=None, gt=0)
    """Constant alpha of the losses; best_response only."""
    norm_penalty: float = Field(default=0.0, ge=0)
    """gamma_h in Eq. (6), weight of the Euclidean norm of the model; a proximal step."""
    radius: float | None = Field(default=None, gt=0)
    """R_W: W is the ball of that radius around 0, and every step is projected onto it; null: all models. The duality gap is to the
    least value over all of them nevertheless, a bound from above."""
    mirror: float = Field(default=2.0, gt=1, le=2)
    """q of the mirror map Phi_W = |w|_q^2 / 2, whose norm the ball is in too; 2: plain steps. Near 1 it favours sparse models."""
    theory: AflTheory | None = None
    """Constants of the problem: take the steps of Theorem 2 instead of lr and dual.lr."""
    average: bool = True
    """Evaluate w^A, the mean of w_1, ..., w_T, as the paper returns; otherwise the last."""

    @model_validator(mode="after")
    def _fits(self) -> AflOptions:
        if self.strong_convexity is not None and self.method != "best_response":
            raise ValueError("strong_convexity is for method: best_response")
        if self.method == "best_response" and self.dual_gradient == "single":
            raise ValueError("method: best_response needs the losses of all domains: leave dual_gradient out")
        if self.correction.remembers:
            others = {
                "gradient": "weighted",
                "dual_gradient": "single",
                "estimator": "ratio",
                "method": "best_response",
            }
            for name, value in others.items():
                if getattr(self, name) == value:
                    raise ValueError(f"{name}={value}: correction: memory has no use for it: leave one of them out")
        sgd = self.optimizer == ClientOptimizer()
        if self.method == "two_sequence" and not (sgd and self.dual.kind == "euclidean"):
            raise ValueError(
                "method: two_sequence steps by plain SGD and projection: leave optimizer and dual.kind out"
            )
        if self.norm_penalty and not (sgd and self.steps == 1 and self.mirror == 2 and self.method != "two_sequence"):
            raise ValueError(
                "norm_penalty is a proximal step after one of plain SGD: leave optimizer, steps, mirror and two_sequence out"
            )
        bound = {"radius": self.radius is not None, "mirror": self.mirror != 2}
        if (given := [name for name, is_ in bound.items() if is_]) and not (sgd and self.steps == 1):
            raise ValueError(f"{given[0]} is of a step of plain SGD: leave optimizer and steps out")
        if self.theory is not None:
            self._proves()
        return self

    def _proves(self) -> None:
        """Refuse what Theorem 2 is not about. Raises ValueError."""
        if self.radius is None:
            raise ValueError("theory is about a bounded set of models: set radius, R_W")
        for name in ("method", "optimizer", "steps", "mirror", "estimator", "norm_penalty", "average"):
            if (value := getattr(self, name)) != AflOptions.model_fields[name].default:
                raise ValueError(f"theory: Theorem 2 is not about {name}={value}: leave it out")
        for name in ("kind", "chi2"):
            if (value := getattr(self.dual, name)) != DualOptions.model_fields[name].default:
                raise ValueError(f"theory: Theorem 2 is not about dual.{name}={value}: leave it out")
        theirs = {"lr": self.lr, "lr_schedule": self.lr_schedule}
        given = [n for n, value in theirs.items() if value != AflOptions.model_fields[n].default]
        given += ["dual.lr"] * (self.dual.lr != DualOptions.model_fields["lr"].default)
        if given:
            raise ValueError(f"theory sets the steps: leave {given[0]} out")

    @property
    def asks_losses(self) -> bool:
        """Whether losses come from a cohort of their own."""
        return self.gradient == "weighted" or self.dual_gradient == "single" or self.method == "best_response"


class Before(NamedTuple):
    """What an optimistic step remembers: the last gradients; of two_sequence, where the sequence behind the points is."""

    g: Tree
    g_mixture: Tensor


class State(NamedTuple):
    """The point (w_t, lambda_t), the last known losses (p,) float64 or NaN, the means over t >= 1, and what steps remember."""

    z: Tree
    mixture: Tensor
    losses: Tensor
    z_mean: Tree
    mixture_mean: Tensor
    optimizer: Any
    before: Before | None
    remembered: Remembered | None = None


def afl(options: AflOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Stochastic-AFL."""
    optimizer, ball = options.optimizer.build(), Ball(options.mirror, options.radius)
    single, responds = options.dual_gradient == "single", options.method == "best_response"
    plan, losses_too = BatchPlan(size=options.batch_size, steps=options.steps), not options.asks_losses
    how, work = options.correction, weighted_gradient(plan, losses=losses_too)
    train = how.changed(
        Phase(
            name="gradient",
            work=work,
            reduce={"g": Total(), **({"loss": ByDomainMean()} if losses_too else {})},
            weight="num_examples",
        )
    )
    if how.remembers:
        by_domain_too = {"g": ByDomainMean(), "loss": ByDomainMean()}
        train = replace(train, work=differing(work), reduce=by_domain_too, own=nothing_sent, dated=True)
    measure = how.changed(
        Phase(
            name="loss",
            work=loss_at_z(None if responds else options.batch_size),
            reduce={"loss": ByDomainMean()},
            weight="uniform" if single else "num_examples",
        )
    )

    def step(z: Tree, lr: float, d: Tree) -> Tree:
        return ball.step(task.objectives["train"], z, lr, d, options.norm_penalty)

    def init(z: Tree, key: Key, problem: Problem) -> State:
        dual = Dual.of(options.dual, of_problem(problem).examples)
        if responds:
            dual.best(dual.sizes)  # that there is one is seen before the work
            if cohort.invite < problem.clients:
                raise ConfigError(
                    f"algorithm.method='best_response': it needs the losses of all clients: set cohort.invite={problem.clients}"
                )
        start = dual.start()
        none = torch.full_like(start, torch.nan)
        known = Remembered.nothing(z, len(start)) if how.remembers else None
        return State(z, start, none, z, start, optimizer.init(z), None, known)

    def losses(state: State, rnd: Round, shared: Message) -> tuple[Tensor, Tensor]:
        domains = len(state.mixture)
        uniform = torch.full((domains,), 1 / domains, dtype=torch.float64)
        invited = by_shares(rnd, cohort.invite, uniform) if single else rnd.invite(cohort.invite)
        invited = how.weighed(rnd, measure, invited, shared=shared)
        found = rnd.map_reduce(measure, shared=shared, cohort=invited)
        estimator = "single" if single else "ratio" if responds else options.estimator
        return told(found, state, rnd, estimator, how.answers(found, invited))

    def told(found: Reduced, state: State, rnd: Round, estimator: str, answers: float) -> tuple[Tensor, Tensor]:
        """Return the estimate of all losses, and those known."""
        known_losses = learnt(found, state.losses)
        return estimated(found, rnd.problem, known_losses, estimator, answers), known_losses

    def gradients(state: State, mixture: Tensor, rnd: Round, shared: Message) -> tuple[Tree, Reduced, float]:
        """Return g_w, what was heard, and for how many clients that stands."""
        if options.gradient == "weighted":
            drawn = how.weighed(rnd, train, by_shares(rnd, cohort.invite, mixture), shared=shared)
            found = rnd.map_reduce(train, shared=shared, cohort=drawn)
            answers = how.answers(found, drawn)
            return T.scale(1 / answers, found["g"]), found, answers
        invited = rnd.invite(cohort.invite)
        scale = share_of(rnd.problem, invited, mixture).to(T.leaves(state.z)[0].dtype)
        invited = how.weighed(rnd, train, invited, shared=shared, inbox=scale)
        found = rnd.map_reduce(train, shared=shared, cohort=invited, inbox=scale)
        answers = how.answers(found, invited)
        if options.estimator == "ratio":
            heard = float(found.unit @ found.config["scale"])
            # It is 0 where lambda gives those heard no weight, and then g is 0 too.
            return T.scale(1 / heard if heard else 0.0, found["g"]), found, answers
        return T.scale(rnd.problem.clients / answers, found["g"]), found, answers

    def recalled(state: State, rnd: Round, shared: Message) -> tuple[Tree, Tensor, Tensor, Remembered]:
        """Return g_w and the losses of all that is remembered, those known, and what is remembered."""
        assert state.remembered is not None
        found = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.invite))
        known = state.remembered.after(found, rnd.problem)
        heard = state.losses.isfinite().index_fill(0, found["loss"].domain, True)
        return known.gradient(state.mixture, state.z), known.losses, known.losses.where(heard, torch.nan), known

    def rates(dual: Dual, t: int) -> tuple[float, float]:
        """Return gamma_w and gamma_lambda of round t."""
        if options.theory is not None and options.radius is not None:
            return options.theory.steps(options.radius, lambda_sets.radius(dual.set))
        if options.strong_convexity is not None:
            return 1 / (options.strong_convexity * (t + 1)), options.dual.lr
        return options.lr * options.lr_schedule.at(t), options.dual.lr

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        dual = Dual.of(options.dual, of_problem(rnd.problem).examples)
        now, dual_now = rates(dual, rnd.index)
        shared = Message({"z": state.z}, {"local_lr": options.local_lr or now})
        asked = losses(state, rnd, shared) if options.asks_losses else None
        answer = dual.best(asked[0]) if responds and asked is not None else None
        known = None
        if how.remembers:
            g, found, known_losses, known = recalled(state, rnd, shared)
        else:
            g, heard, answers = gradients(state, state.mixture if answer is None else answer, rnd, shared)
            found, known_losses = told(heard, state, rnd, options.estimator, answers) if asked is None else asked
        g_mixture = dual.gradient(found, state.mixture)
        before, moments = Before(g, g_mixture), state.optimizer
        if options.method == "two_sequence":
            last = state.before  # there is none in round 0, whose gradient is taken to be the one before it too
            z, mixture = (
                (state.z, state.mixture)
                if last is None
                else (step(last.g, now, g), dual.step(last.g_mixture, g_mixture))
            )
            before = Before(z, mixture)
            z, mixture = step(z, now, g), dual.step(mixture, g_mixture)
        else:
            d, d_mixture = g, g_mixture
            if options.method == "optimistic" and state.before is not None:
                d, d_mixture = T.sub(T.scale(2.0, g), state.before.g), 2 * g_mixture - state.before.g_mixture
            d, moments = optimizer.update(state.optimizer, d, state.z)
            z = step(state.z, now, d)
            mixture = dual.step(state.mixture, d_mixture, dual_now) if answer is None else answer
        t = rnd.index + 1
        remembers = options.method in ("optimistic", "two_sequence")
        new = State(
            z=z,
            mixture=mixture,
            losses=known_losses,
            z_mean=T.axpy(1 / t, T.sub(z, state.z_mean), state.z_mean),
            mixture_mean=state.mixture_mean + (mixture - state.mixture_mean) / t,
            optimizer=moments,
            before=before if remembers else None,
            remembered=known,
        )
        return new, {
            "worst_loss": float(known_losses.nan_to_num(-torch.inf).max()),
            "largest_weight": float(mixture.max()),
        }

    phases = (train, measure) if options.asks_losses else (train,)
    view = View(lambda state: state.z_mean if options.average else state.z)

    def by_domain(state: State) -> dict[str, Tensor]:
        return {"lambda": state.mixture, "mean_lambda": state.mixture_mean, "train_loss": state.losses}

    def saddle(state: State, problem: Problem) -> Saddle:
        dual = Dual.of(options.dual, of_problem(problem).examples)
        mixture = state.mixture_mean if options.average else state.mixture
        return Saddle(view.params(state), mixture, dual.at, dual.value, lambda z: options.norm_penalty * T.norm(z))

    proven = options.theory is not None or options.strong_convexity is not None
    rounds = None if options.theory is None else options.theory.rounds
    return Algorithm(
        init,
        round,
        phases,
        {"global": view},
        domains=by_domain,
        saddle=saddle,
        convex=proven,
        rounds=rounds,
        chances=how.asks(options.estimator == "ratio"),
    )
