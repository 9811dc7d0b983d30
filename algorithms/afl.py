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

A round, both gradients at (w_{t-1}, lambda_{t-1}):

    w_t      = w_{t-1} - gamma_w g_w                         g_w      estimates sum_k lambda_k grad L_k
    lambda_t = Proj(lambda_{t-1} + gamma_lambda g_lambda)    g_lambda estimates (L_1, ..., L_p)

    per_domain  a uniform cohort; client i of domain k sends its gradient times lambda_k n_i / m_k, and its loss
    weighted    domains drawn from lambda, in each a client by examples; a second cohort sends losses
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.algorithms.mixture import Dual, DualOptions
from fedfleet.algorithms.options import ClientOptimizer, CohortOptions, Options, Schedule
from fedfleet.simulator.author import (
    Algorithm,
    At,
    Batch,
    BatchPlan,
    ByDomainMean,
    Cohort,
    Domains,
    Key,
    LocalWork,
    Message,
    Ops,
    Phase,
    Problem,
    Reduced,
    Round,
    Saddle,
    Stage,
    T,
    Task,
    Total,
    Tree,
    View,
    rng,
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
    """What answers of some clients say of all: unbiased; or as shares of those heard, biased with less variance."""
    method: Literal["plain", "optimistic", "two_sequence", "best_response"] = "plain"
    """optimistic: steps along twice the gradient minus the last one; two_sequence: the same with the points that were played
    beside; best_response: lambda is the worst mixture for the last losses, and lr is 1 / (strong_convexity t) if that is given."""
    strong_convexity: float | None = Field(default=None, gt=0)
    """Constant alpha of the losses; best_response only."""
    norm_penalty: float = Field(default=0.0, ge=0)
    """gamma_h in Eq. (6), weight of the Euclidean norm of the model; a proximal step."""
    average: bool = True
    """Evaluate w^A, the mean of w_1, ..., w_T, as the paper returns; otherwise the last."""

    @model_validator(mode="after")
    def _fits(self) -> AflOptions:
        if self.strong_convexity is not None and self.method != "best_response":
            raise ValueError("strong_convexity is for method: best_response")
        if self.method == "two_sequence" and (self.optimizer != ClientOptimizer() or self.dual.kind != "euclidean"):
            raise ValueError(
                "method: two_sequence steps by plain SGD and projection: leave optimizer and dual.kind out"
            )
        plain = self.optimizer == ClientOptimizer() and self.steps == 1 and self.method != "two_sequence"
        if self.norm_penalty and not plain:
            raise ValueError(
                "norm_penalty is a proximal step after one of plain SGD: leave optimizer, steps and two_sequence out"
            )
        return self

    @property
    def asks_losses(self) -> bool:
        """Whether losses come from a cohort of their own."""
        return self.gradient == "weighted" or self.dual_gradient == "single" or self.method == "best_response"


class Before(NamedTuple):
    """What an optimistic step remembers: the last gradients; of two_sequence, where the sequence behind the points is."""

    g: Tree
    g_mixture: Tensor


class State(NamedTuple):
    """The point (w_t, lambda_t), the last known losses (p,) float64 or NaN, the means over t >= 1, and what the step remembers."""

    z: Tree
    mixture: Tensor
    losses: Tensor
    z_mean: Tree
    mixture_mean: Tensor
    optimizer: Any
    before: Before | None


class _Path(NamedTuple):
    """The sum of the gradients along a client's local steps, and the loss at the first."""

    total: Tree
    loss: Tensor


def weighted_gradient(plan: BatchPlan) -> LocalWork:
    """Return the sum of minibatch gradients along local steps from ``shared["z"]``, times ``inbox``, and the loss there."""

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> _Path:
        return _Path(T.zeros_like(shared["z"]), torch.zeros_like(inbox))

    def step(ops: Ops, shared: Mapping[str, Any], path: _Path, batch: Batch, at: At, key: Key) -> _Path:
        here = shared["z"] if at.k == 0 else T.axpy(-shared["local_lr"], path.total, shared["z"])
        d, aux = ops.grad("train", here, batch, key)
        if at.k == 0:
            return _Path(d, aux["loss"])
        return _Path(T.add(path.total, d), path.loss)

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, path: _Path) -> tuple[Message, Tree]:
        return Message({"g": T.scale(inbox, path.total), "loss": path.loss}, {"scale": inbox}), own

    return LocalWork(begin=begin, stages=(Stage(step=step, batches=plan),), finish=finish)


def loss_at_z(size: int | None) -> LocalWork:
    """Return the loss at ``shared["z"]`` on one batch of so many examples, or on all."""

    def begin(shared: Mapping[str, Any], own: Tree, inbox: Tree, key: Key) -> Tree:
        return torch.zeros((), dtype=T.leaves(shared["z"])[0].dtype)

    def step(ops: Ops, shared: Mapping[str, Any], carry: Tree, batch: Batch, at: At, key: Key) -> Tree:
        return ops.value("train", shared["z"], batch, key)

    def finish(shared: Mapping[str, Any], own: Tree, inbox: Tree, carry: Tree) -> tuple[Message, Tree]:
        return Message({"loss": carry}), own

    plan = BatchPlan(size=size, steps=1)
    return LocalWork(begin=begin, stages=(Stage(step=step, batches=plan),), finish=finish, divisible=False)


def by_shares(rnd: Round, size: int, mixture: Tensor) -> Cohort:
    """Invite clients of domains drawn from a mixture with replacement, in each by the number of examples."""
    domains = of_problem(rnd.problem)

    def clients(number: int, key: Key) -> Tensor:
        u = rng.uniform(rng.fold(key, "domain"), (number,), torch.float64)
        upto = mixture.cumsum(0)
        drawn = torch.searchsorted(upto, u * upto[-1], right=True)
        return domains.draw(drawn, rng.fold(key, "client"))

    return rnd.draw(size, clients)


def share_of(problem: Problem, cohort: Cohort, mixture: Tensor) -> Tensor:
    """Return lambda_k n_i / m_k of each client i of a cohort, k its domain: its part in the mixture of all examples."""
    domains = of_problem(problem)
    mine = domains.of(cohort.clients)
    assert problem.num_examples is not None
    return mixture[mine] * problem.num_examples(cohort.clients) / domains.examples[mine]


def of_problem(problem: Problem) -> Domains:
    """Return the domains of a federation. Raises ValueError where it has none."""
    if problem.domains is None:
        raise ValueError("the problem has no domains")
    return problem.domains


def learnt(found: Reduced, known: Tensor) -> Tensor:
    """Return the last known losses (p,), NaN for domains that nobody has answered for yet, with those just heard."""
    heard = found["loss"]
    return known.index_copy(0, heard.domain, heard.value.double())


def estimated(found: Reduced, problem: Problem, known_losses: Tensor, estimator: str) -> Tensor:
    """Return the losses (p,) of all domains from those of the clients heard.

    "horvitz_thompson": (N/S) sum n_i L_i / m_k, 0 for a domain nobody answered for; "ratio": ``known_losses``, their mean where
    there is none yet; "single": p times the mean over all answers, of clients drawn from domains drawn uniformly.
    """
    heard, examples = found["loss"], of_problem(problem).examples
    value, weight, answers = heard.value.double(), heard.weight.double(), float(found.unit.sum())
    if estimator == "ratio":
        return known_losses.where(known_losses.isfinite(), known_losses.nanmean().nan_to_num())
    drawn = len(examples) if estimator == "single" else problem.clients / examples[heard.domain].double()
    return torch.zeros_like(known_losses).index_copy(0, heard.domain, value * weight * drawn / answers)


def afl(options: AflOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build Stochastic-AFL."""
    optimizer = options.optimizer.build()
    single = options.dual_gradient == "single"
    train = Phase(
        name="gradient",
        work=weighted_gradient(BatchPlan(size=options.batch_size, steps=options.steps)),
        reduce={"g": Total(), "loss": ByDomainMean()},
        weight="num_examples",
    )
    measure = Phase(
        name="loss",
        work=loss_at_z(options.batch_size),
        reduce={"loss": ByDomainMean()},
        weight="uniform" if single else "num_examples",
    )

    def init(z: Tree, key: Key, problem: Problem) -> State:
        dual = Dual.of(options.dual, of_problem(problem).examples)
        if options.method == "best_response":
            dual.best(dual.sizes)  # that there is one is seen before the work
        start = dual.start()
        return State(z, start, torch.full_like(start, torch.nan), z, start, optimizer.init(z), None)

    def losses(state: State, rnd: Round, shared: Message) -> tuple[Tensor, Tensor]:
        domains = len(state.mixture)
        uniform = torch.full((domains,), 1 / domains, dtype=torch.float64)
        invited = by_shares(rnd, cohort.invite, uniform) if single else rnd.invite(cohort.invite)
        return told(
            rnd.map_reduce(measure, shared=shared, cohort=invited),
            state,
            rnd,
            "single" if single else options.estimator,
        )

    def told(found: Reduced, state: State, rnd: Round, how: str) -> tuple[Tensor, Tensor]:
        """Return the estimate of all losses, and those known."""
        known_losses = learnt(found, state.losses)
        return estimated(found, rnd.problem, known_losses, how), known_losses

    def gradients(state: State, mixture: Tensor, rnd: Round, shared: Message) -> tuple[Tree, Reduced]:
        if options.gradient == "weighted":
            invited = by_shares(rnd, cohort.invite, mixture)
            scale = torch.ones(len(invited))
        else:
            invited = rnd.invite(cohort.invite)
            scale = share_of(rnd.problem, invited, mixture)
        kind = T.leaves(state.z)[0].dtype
        found = rnd.map_reduce(train, shared=shared, cohort=invited, inbox=scale.to(kind))
        if options.gradient == "weighted" or options.estimator == "ratio":
            heard = float(found.unit @ found.config["scale"])
            # It is 0 where lambda gives those heard no weight, and then g is 0 too.
            return T.scale(1 / heard if heard else 0.0, found["g"]), found
        return T.scale(rnd.problem.clients / float(found.unit.sum()), found["g"]), found

    def round(state: State, rnd: Round) -> tuple[State, dict[str, float]]:
        dual = Dual.of(options.dual, of_problem(rnd.problem).examples)
        now = options.lr * options.lr_schedule.at(rnd.index)
        if options.strong_convexity is not None:
            now = 1 / (options.strong_convexity * (rnd.index + 1))
        shared = Message({"z": state.z}, {"local_lr": options.local_lr or now})
        asked = losses(state, rnd, shared) if options.asks_losses else None
        answer = dual.best(asked[0]) if options.method == "best_response" and asked is not None else None
        g, heard = gradients(state, state.mixture if answer is None else answer, rnd, shared)
        found, known_losses = told(heard, state, rnd, options.estimator) if asked is None else asked
        g_mixture = dual.gradient(found, state.mixture)
        step = task.objectives["train"].step
        before, moments = Before(g, g_mixture), state.optimizer
        if options.method == "two_sequence":
            behind = state.before or Before(state.z, state.mixture)
            behind = Before(step(behind.g, now, g), dual.step(behind.g_mixture, g_mixture))
            z, mixture, before = step(behind.g, now, g), dual.step(behind.g_mixture, g_mixture), behind
        else:
            d, d_mixture = g, g_mixture
            if options.method == "optimistic" and state.before is not None:
                d, d_mixture = T.sub(T.scale(2.0, g), state.before.g), 2 * g_mixture - state.before.g_mixture
            d, moments = optimizer.update(state.optimizer, d, state.z)
            z = step(state.z, now, d)
            mixture = dual.step(state.mixture, d_mixture) if answer is None else answer
        if options.norm_penalty:
            z = T.scale((1 - now * options.norm_penalty / T.norm(z)).clamp(min=0), z)
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

    return Algorithm(init, round, phases, {"global": view}, requires=("x",), domains=by_domain, saddle=saddle)
