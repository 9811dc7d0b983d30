"""AFL: the model that does best on the worst mixture of domains.

Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019: Stochastic-AFL, Figures 3 and 4. In the cross-device form the
domains are made up of clients, of which some take part; with a client a domain and all of them invited it is the paper's.
What is not in Figures 3 and 4 is in `afl_variants.py`.

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

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms import lambda_sets
from fedfleet.algorithms.afl_theory import AflTheory
from fedfleet.algorithms.afl_variants import (
    Before,
    VariantOptions,
    extrapolated,
    known_after,
    remembering,
    two_sequence,
)
from fedfleet.algorithms.agnostic import (
    by_shares,
    estimated,
    latest_losses,
    loss_at_z,
    of_problem,
    share_of,
    weighted_gradient,
)
from fedfleet.algorithms.domain_participation import Remembered, Weighing
from fedfleet.algorithms.mirror import Ball
from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.algorithms.options import ClientOptimizer, CohortOptions, LocalData, Schedule
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


class AflOptions(VariantOptions):
    """Options of AFL."""

    lr: float = Field(default=0.1, gt=0)
    """Step of the model, gamma_w."""
    lr_schedule: Schedule = Schedule()
    optimizer: ClientOptimizer = ClientOptimizer()
    """The rule of the server's step."""
    dual: DualOptions = DualOptions()
    batch_size: int | None = Field(default=10, ge=1)
    """Examples of a client in a gradient; null: all it has."""
    gradient: Literal["per_domain", "weighted"] = "per_domain"
    """Figure 4: who sends gradients."""
    dual_gradient: Literal["per_domain", "single"] = "per_domain"
    """Figure 4: losses of a uniform cohort; or of one client a domain, in domains drawn uniformly."""
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

    def local_data(self) -> LocalData:
        """Return how much of its data a client takes at once."""
        return self._batches(self.batch_size, steps=self.steps)

    @property
    def proven(self) -> bool:
        """Whether constants of a theorem set the steps."""
        return self.theory is not None

    @model_validator(mode="after")
    def _fits(self) -> AflOptions:
        if self.method == "best_response" and self.dual_gradient == "single":
            raise ValueError("method: best_response needs the losses of all domains: leave dual_gradient out")
        for name, value in {"gradient": "weighted", "dual_gradient": "single"}.items():
            if self.correction.remembers and getattr(self, name) == value:
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
        train = remembering(train, work)
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
            if cohort.size < problem.clients:
                raise ConfigError(
                    f"algorithm.method='best_response': it needs the losses of all clients: set cohort.size={problem.clients}"
                )
        start = dual.start()
        none = torch.full_like(start, torch.nan)
        known = Remembered.nothing(z, len(start)) if how.remembers else None
        return State(z, start, none, z, start, optimizer.init(z), None, known)

    def losses(state: State, rnd: Round, shared: Message, weighed: Weighing) -> tuple[Tensor, Tensor]:
        domains = len(state.mixture)
        uniform = torch.full((domains,), 1 / domains, dtype=torch.float64)
        invited = by_shares(rnd, cohort.size, uniform) if single else rnd.invite(cohort.size)
        invited = weighed(measure, invited, shared=shared)
        result = rnd.map_reduce(measure, shared=shared, cohort=invited)
        estimator = "single" if single else "ratio" if responds else options.estimator
        return told(result, state, rnd, estimator, how.answers(result, invited))

    def told(result: Reduced, state: State, rnd: Round, estimator: str, answers: float) -> tuple[Tensor, Tensor]:
        """Return the estimate of all losses, and those known."""
        known_losses = latest_losses(result, state.losses)
        return estimated(result, rnd.problem, known_losses, estimator, answers), known_losses

    def gradients(
        state: State, mixture: Tensor, rnd: Round, shared: Message, weighed: Weighing
    ) -> tuple[Tree, Reduced, float]:
        """Return g_w, what was heard, and for how many clients that stands."""
        if options.gradient == "weighted":
            drawn = weighed(train, by_shares(rnd, cohort.size, mixture), shared=shared)
            result = rnd.map_reduce(train, shared=shared, cohort=drawn)
            answers = how.answers(result, drawn)
            return T.scale(1 / answers, result["g"]), result, answers
        invited = rnd.invite(cohort.size)
        scale = share_of(rnd.problem, invited, mixture).to(T.leaves(state.z)[0].dtype)
        invited = weighed(train, invited, shared=shared, client_input=scale)
        result = rnd.map_reduce(train, shared=shared, cohort=invited, client_input=scale)
        answers = how.answers(result, invited)
        if options.estimator == "ratio":
            heard = float(result.unit @ result.config["scale"])
            # It is 0 where lambda gives those heard no weight, and then g is 0 too.
            return T.scale(1 / heard if heard else 0.0, result["g"]), result, answers
        return T.scale(rnd.problem.clients / answers, result["g"]), result, answers

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
        weighed = how.weighing(rnd)
        asked = losses(state, rnd, shared, weighed) if options.asks_losses else None
        answer = dual.best(asked[0]) if responds and asked is not None else None
        known = None
        if state.remembered is not None:
            reduced = rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))
            known, known_losses = known_after(state.remembered, state.losses, reduced, rnd.problem)
            g, result = known.gradient(state.mixture, state.z), known.losses
        else:
            g, heard, answers = gradients(state, state.mixture if answer is None else answer, rnd, shared, weighed)
            result, known_losses = told(heard, state, rnd, options.estimator, answers) if asked is None else asked
        gradient, before, moments = Before(g, dual.gradient(result, state.mixture)), None, state.optimizer
        if options.method == "two_sequence":
            before, (z, mixture) = two_sequence(
                state.before,
                Before(state.z, state.mixture),
                lambda z: step(z, now, gradient.g),
                lambda mixture: dual.step(mixture, gradient.g_mixture),
            )
        else:
            if options.method == "optimistic":
                before, gradient = gradient, extrapolated(state.before, gradient)
            d, moments = optimizer.update(state.optimizer, gradient.g, state.z)
            z = step(state.z, now, d)
            mixture = dual.step(state.mixture, gradient.g_mixture, dual_now) if answer is None else answer
        new = state._replace(
            z=z, mixture=mixture, losses=known_losses, optimizer=moments, before=before, remembered=known
        )
        return averaged(new, rnd), {
            "worst_loss": float(known_losses.nan_to_num(-torch.inf).max()),
            "largest_weight": float(mixture.max()),
            **weighed.metrics,
        }

    def averaged(state: State, rnd: Round) -> State:
        """Return the state whose means count the model and lambda once more, as also after a round that nobody has answered."""
        t = rnd.index + 1
        z_mean = T.axpy(1 / t, T.sub(state.z, state.z_mean), state.z_mean)
        return state._replace(z_mean=z_mean, mixture_mean=state.mixture_mean + (state.mixture - state.mixture_mean) / t)

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
        skipped=averaged,
    )
