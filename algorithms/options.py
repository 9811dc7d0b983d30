"""Options that algorithms share: what a user may write under ``algorithm:`` in a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, ValidationInfo, model_validator

from fedfleet.simulator.author import BatchPlan, Optimizer, Options, Scalar, adagrad, adam, adaptive, sgd


def refuse_others(options: Options, kind: str, used: Set[str], every: Set[str]) -> None:
    """Refuse what was set among ``every`` option that some kinds have, and this one does not use. Raises ValueError."""
    for key in sorted(every - used):
        if (value := getattr(options, key)) != type(options).model_fields[key].default:
            takes = f" (options of {kind}: {', '.join(sorted(used))})" if used else ""
            raise ValueError(f"{key}={value} is not for {kind}: leave it out{takes}")


def take_rounds(options: Options, info: ValidationInfo) -> None:
    """Set ``rounds``, where it is not given, to those of the run, so that it stands in config.yaml."""
    if vars(options)["rounds"] is None:
        object.__setattr__(options, "rounds", (info.context or {}).get("rounds"))


class CohortOptions(Options):
    """Who is invited, and how many answers are waited for."""

    size: int = Field(default=10, ge=1)
    """Clients invited a phase, S-hat."""
    wait_for: Literal["all", "siwer"] | Annotated[int, Field(ge=1)] = "all"
    """Answers waited for: "all" online clients; "siwer": S_t = ceil(p_t * size) with p_t uniform; or a fixed number S."""
    response_low: float = Field(default=0.5, ge=0, le=1)
    """Lower end of p_t (siwer)."""
    response_high: float = Field(default=1.0, gt=0, le=1)
    """Upper end of p_t (siwer)."""
    resample: bool = True
    """Draw a new cohort for each phase of a round; false invites the same clients and redraws who answers."""
    shared_response_count: bool = False
    """Use one p_t for all phases of a round."""
    over_select: float = Field(default=1.0, ge=1, le=1000)
    """Invite ceil(over_select * size) clients and go on with the first ``size`` answers; with ``wait_for: all`` only."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Virtual seconds after which the server waits no longer, whatever ``wait_for`` says."""
    partial_work: bool = False
    """Under a deadline, a slow client sends what it has after as many local steps as it can finish in time."""
    min_responses: int = Field(default=1, ge=1)
    """A phase with fewer answers is aborted; ``on_abort`` says what follows."""
    on_abort: Literal["retry", "skip"] = "retry"
    """retry: a round with an aborted phase starts again with new cohorts; skip: it counts, and the model stays as it was."""
    attempts: int = Field(default=10, ge=1)
    """Cohorts tried for a round before the run gives up (retry)."""
    retry_s: float = Field(default=1.0, ge=0, le=1e9)
    """Virtual seconds between an aborted attempt and the next, or the next round (skip)."""
    late: Literal["discard", "keep"] = "discard"
    """What becomes of answers that come too late: thrown away, or used in the same phase of a later round."""
    stale_discount: float = Field(default=0.5, gt=0, le=1)
    """Weight of a late answer that was kept, for each round of delay."""

    @property
    def fewest(self) -> int:
        """The fewest answers that a phase waits for, where as many can be reached and in time: min S_t."""
        if self.wait_for == "siwer":  # S_t = ceil(p_t * size) with p_t above response_low
            above, most = (round(p * self.size, 9) for p in (self.response_low, self.response_high))
            return min(math.floor(above) + 1, max(1, math.ceil(most)))
        return self.size if self.wait_for == "all" else self.wait_for

    @model_validator(mode="after")
    def _consistent(self) -> CohortOptions:
        if self.over_select > 1 and self.wait_for != "all":
            raise ValueError(
                "over_select above 1 needs wait_for: all, since it already waits for the first `size` answers"
            )
        if self.partial_work and self.deadline_s is None:
            raise ValueError("partial_work needs deadline_s, the time by which clients stop")
        return self


class Torchs(NamedTuple):
    """A class of ``torch.optim`` in our words: its name here, those of its options, and what it has fixed."""

    name: str
    options: Mapping[str, str] = MappingProxyType({})
    fixed: Mapping[str, Any] = MappingProxyType({})
    needed: str | None = None
    """The one of its options that has no default in torch."""
    instead: Mapping[str, str] = MappingProxyType({})
    """Options of torch's that have another one in their place, and what to give."""


class ByName(Options):
    """Options that a name alone may stand for."""

    naming: ClassVar[str] = "name"
    """The option that it is."""
    torchs: ClassVar[Mapping[str, Torchs]] = MappingProxyType({})
    """Classes of ``torch.optim`` that may be named instead, with their own options."""
    used: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})
    """Options that not every name has, by the names that have them."""

    @classmethod
    def _of_some(cls) -> set[str]:
        """Return the options that not every name has."""
        return set().union(*cls.used.values())

    @classmethod
    def _options(cls, name: str) -> list[str]:
        """Return the options of a name."""
        others = {cls.naming, *cls._of_some()}.difference(cls.used[name])
        return [key for key in cls.model_fields if key not in others]

    def _check_used(self) -> None:
        """Refuse an option that is of other names. Raises ValueError."""
        name = getattr(self, self.naming)
        refuse_others(self, name, {*self.used[name]}, self._of_some())

    @model_validator(mode="before")
    @classmethod
    def _named(cls, said: Any) -> Any:
        said = {cls.naming: said} if isinstance(said, str) else said
        if not isinstance(said, Mapping):
            return said
        name = said.get(cls.naming)
        known = cls.torchs.get(name.rpartition(".")[2]) if isinstance(name, str) else None
        if known is None:
            ours = get_args(cls.model_fields[cls.naming].annotation)
            if cls.torchs and isinstance(name, str) and name not in ours:
                raise ValueError(f"{name} is unknown: choose one of {', '.join([*ours, *cls.torchs])}")
            return said
        called = {ours: theirs for theirs, ours in known.options.items()} | dict.fromkeys(("beta1", "beta2"), "betas")
        if lost := [key for key in said if key not in (cls.naming, "betas", *known.options, *cls.model_fields)]:
            options = [called.get(key, key) for key in cls._options(known.name) if key not in known.fixed]
            choice = known.instead.get(lost[0]) or f"choose among {', '.join(dict.fromkeys(options))}"
            raise ValueError(f"{name} has no option {lost[0]} here: {choice}")
        given = {known.options.get(key, key): value for key, value in said.items() if key != cls.naming}
        if known.needed is not None and known.options[known.needed] not in given:
            raise ValueError(f"{name} needs {known.needed}: give it")
        if isinstance(betas := given.pop("betas", None), list | tuple) and len(betas) == 2:
            given |= {"beta1": betas[0], "beta2": betas[1]}
        elif betas is not None:
            raise ValueError(f"betas={betas!r}: give two numbers")
        return {cls.naming: known.name, **known.fixed, **given}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        """Tell editors so."""
        whole = handler(core)
        names = handler.resolve_ref_schema(whole)["properties"][cls.naming]
        return {"anyOf": [{"enum": [*names["enum"], *cls.torchs], "type": "string"}, whole]}


class Schedule(ByName):
    """Change of the learning rate over rounds t = 0 .. T - 1, or over a client's epochs."""

    naming = "kind"
    used = MappingProxyType(
        {
            "constant": (),
            "power": ("exponent", "over", "floor", "by"),
            "step": ("every", "factor", "floor", "by"),
            "cosine": ("rounds", "floor", "by"),
        }
    )
    torchs = MappingProxyType(
        {
            "StepLR": Torchs("step", {"step_size": "every", "gamma": "factor"}, needed="step_size"),
            "ExponentialLR": Torchs("step", {"gamma": "factor"}, {"every": 1}, needed="gamma"),
            "CosineAnnealingLR": Torchs(
                "cosine",
                {"T_max": "rounds"},
                needed="T_max",
                instead={"eta_min": "give floor, which is eta_min / lr, a share"},
            ),
        }
    )
    kind: Literal["constant", "power", "step", "cosine"] = "constant"
    """constant; power: 1 / (t / over + 1)^exponent; step: factor^(t // every); cosine: from 1 to ``floor`` over
    ``rounds``. Or torch's StepLR, ExponentialLR and CosineAnnealingLR, with torch's options."""
    exponent: float | None = Field(default=None, ge=0)
    """power only; 0.5 if not given."""
    over: float | None = Field(default=None, gt=0)
    """power only: rounds, or epochs, of a unit of time; 1 if not given."""
    every: int | None = Field(default=None, ge=1)
    """step only, which needs it: rounds, or epochs, after which the rate falls."""
    factor: float | None = Field(default=None, gt=0, le=1)
    """step only: by what it falls; 0.1 if not given."""
    rounds: int | None = Field(default=None, ge=1)
    """cosine only: rounds until the rate would be at its end; those of the run if not given."""
    floor: float | None = Field(default=None, ge=0, le=1)
    """Not constant: the share of the rate below which it does not fall, of a cosine that at the end; 0 if not given."""
    by: Literal["round", "epoch"] = "round"
    """Not constant. epoch: t counts a client's local epochs, as if it had done those of every round so far."""

    @model_validator(mode="after")
    def _applies(self, info: ValidationInfo) -> Schedule:
        self._check_used()
        if self.kind == "step" and self.every is None:
            raise ValueError("step needs every, the rounds after which the rate falls: give it")
        rounds = (info.context or {}).get("rounds")
        if self.rounds is not None and rounds is not None and self.rounds < rounds and not self.floor:
            raise ValueError(
                f"rounds={self.rounds} (torch's T_max): from then on the rate would be 0, and the run has rounds={rounds}: give as "
                f"many, or floor"
            )
        filled = {"power": {"exponent": 0.5}, "step": {"factor": 0.1}, "cosine": {"rounds": rounds and max(1, rounds)}}
        for key, value in filled.get(self.kind, {}).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)  # so that it stands in config.yaml
        return self

    def at(self, t: int, a_round: int = 1) -> float:
        """Return the multiplier at time t, of which a round has so many units: epochs, or itself alone.

        Raises ValueError for a cosine over no known number of rounds.
        """
        floor = self.floor or 0.0
        match self:
            case Schedule(kind="power", exponent=float() as exponent):
                return max(floor, (t / (self.over or 1.0) + 1) ** -exponent)
            case Schedule(kind="step", every=int() as every, factor=float() as factor):
                return max(floor, factor ** (t // every))
            case Schedule(kind="cosine", rounds=int() as rounds):
                return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(t / (rounds * a_round), 1.0)))
            case Schedule(kind="cosine"):
                raise ValueError("lr_schedule: a cosine needs rounds, over which it falls, outside of a run")
            case _:
                return 1.0


def rate_left(algorithm: Any, rounds: int) -> float:
    """Return the share of its learning rate with which an algorithm, by its options, began the last of so many rounds.

    It is that of clients' first epochs; 1 where no schedule is among the options.
    """
    while not isinstance(schedule := getattr(algorithm, "lr_schedule", None), Schedule):
        if (algorithm := getattr(algorithm, "of", None)) is None:
            return 1.0
    epochs = (getattr(algorithm, "epochs", None) or 1) if schedule.by == "epoch" else 1
    return schedule.at(max(0, rounds - 1) * epochs, epochs)


class ClientOptimizer(ByName):
    """The rule for directions, as in torch.optim, whose names do too."""

    torchs = MappingProxyType(
        {
            "SGD": Torchs("sgd"),
            "Adam": Torchs("adam"),
            "AdamW": Torchs("adamw"),
            "Adagrad": Torchs("adagrad", fixed={"eps": 1e-10}),
        }
    )
    used = MappingProxyType(
        {
            "sgd": ("momentum", "nesterov"),
            **dict.fromkeys(("adam", "adamw"), ("beta1", "beta2", "eps")),
            "adagrad": ("eps",),
        }
    )
    name: Literal["sgd", "adam", "adamw", "adagrad"] = "sgd"
    """Or torch's SGD, Adam, AdamW and Adagrad, with torch's options."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """SGD only."""
    nesterov: bool = False
    """SGD only; needs momentum."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Part of the gradient, but of adamw, which shrinks weights beside it; there 0.01 if not given, as in torch."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest Euclidean norm of a direction."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Adam and AdamW only, as beta1."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam, AdamW and Adagrad."""

    @model_validator(mode="after")
    def _applies(self) -> ClientOptimizer:
        self._check_used()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov looks ahead along momentum: set momentum, or leave it out")
        if self.name == "adamw" and "weight_decay" not in self.model_fields_set:
            object.__setattr__(self, "weight_decay", 0.01)  # so that it stands in config.yaml
        return self

    def build(self) -> Optimizer:
        """Return the optimiser."""
        decay = {"weight_decay": self.weight_decay, "clip_norm": self.clip_norm}
        if self.name in ("adam", "adamw"):
            decoupled = self.name == "adamw"
            return adam(beta1=self.beta1, beta2=self.beta2, eps=self.eps, decoupled=decoupled, **decay)
        if self.name == "adagrad":
            return adagrad(eps=self.eps, **decay)
        return sgd(momentum=self.momentum, nesterov=self.nesterov, **decay)


class LocalOptimizer(ClientOptimizer):
    """The rule for directions, as in torch.optim, and what becomes of a client's state of it between its rounds."""

    state: Literal["reset", "persist"] = "reset"
    """reset: it starts afresh in every round; persist: each client keeps it from one of its rounds to its next."""

    @model_validator(mode="after")
    def _has_state(self) -> LocalOptimizer:
        if self.state == "persist" and not self.build().remembers:
            raise ValueError("state=persist: sgd without momentum has no state: set momentum, or leave it out")
        return self


class ServerOptimizer(ByName):
    """What the server does with the mean update (Reddi et al. 2021): FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi."""

    used = MappingProxyType(
        {
            "sgd": ("momentum",),
            "adagrad": ("beta1", "eps"),
            **dict.fromkeys(("adam", "yogi"), ("beta1", "beta2", "eps")),
        }
    )
    name: Literal["sgd", "adagrad", "adam", "yogi"] = "sgd"
    lr: float = Field(default=1.0, gt=0)
    """Server learning rate, eta."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """SGD only: with 0.9, FedAvgM (Hsu et al. 2019)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Not SGD: weight of the old first moment; the experiments behind FedAdagrad set it to 0."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Adam and Yogi: weight of the old second moment."""
    eps: float = Field(default=1e-3, gt=0)
    """Not SGD: the degree of adaptivity, tau; second moments start at its square."""

    @model_validator(mode="after")
    def _applies(self) -> ServerOptimizer:
        self._check_used()
        return self

    def build(self) -> Optimizer:
        """Return the optimiser."""
        if self.name == "sgd":
            return sgd(momentum=self.momentum)
        return adaptive(self.name, beta1=self.beta1, beta2=self.beta2, tau=self.eps)


class LocalData(NamedTuple):
    """Amount of its data that a client takes at once.

    Attributes:
        batch_size: examples a step; None: all that the client has.
        usual: the batch size where none is given.
        steps, epochs: how long it trains, in the one or the other.

    """

    batch_size: int | None
    usual: int | None
    steps: int | None = None
    epochs: int | None = None


class AlgorithmOptions(Options):
    """Options of an algorithm, and what the engine asks of any."""

    def local_data(self) -> LocalData | None:
        """Return how much of its data a client takes at once; None where the algorithm has no option for that."""
        return None

    @property
    def proven(self) -> bool:
        """Whether constants of a theorem set the steps."""
        return False

    @property
    def rates_by_epoch(self) -> bool:
        """Whether rates may fall within a round: nothing but clients' steps depends on them."""
        return False

    def given_dual_lr(self) -> float | None:
        """Return the learning rate of the dual part, if one is given."""
        return None

    def _batches(self, batch_size: int | None, *, steps: int | None = None, epochs: int | None = None) -> LocalData:
        return LocalData(batch_size, type(self).model_fields["batch_size"].default, steps, epochs)


class LocalOptions(AlgorithmOptions):
    """Local training: how many steps on which batches with which learning rates."""

    steps: int | None = Field(default=None, ge=1)
    """Local steps a round, K; give this or ``epochs``."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the local data a round; one if neither is given."""
    batch_size: int = Field(default=10, ge=1)
    """Examples a step, B."""
    lr: float = Field(default=0.1, gt=0)
    """Learning rate of the primal part, eta."""
    dual_lr: float | None = Field(default=None, gt=0)
    """Learning rate of the dual part, gamma; the same as ``lr`` if not given. Minimax tasks only."""
    lr_schedule: Schedule = Schedule()
    """How both rates change over rounds: constant, power, step or cosine, or a mapping of that kind and its options."""

    @model_validator(mode="after")
    def _one_length(self) -> LocalOptions:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give steps or epochs, not both")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 1)  # so that it stands in config.yaml
        if self.steps is not None and self.lr_schedule.by == "epoch":
            raise ValueError(
                f"lr_schedule.by='epoch': clients work for steps={self.steps}: give epochs, or choose round"
            )
        return self

    def local_data(self) -> LocalData:
        """Return how much of its data a client takes at once."""
        return self._batches(self.batch_size, steps=self.steps, epochs=self.epochs)

    @property
    def rates_by_epoch(self) -> bool:
        """Whether clients have an optimiser, whose steps the rates are of, and no memory is in their units."""
        correction = getattr(self, "correction", None)
        return "client_optimizer" in type(self).model_fields and getattr(correction, "kind", None) != "mifa"

    def given_dual_lr(self) -> float | None:
        """Return ``dual_lr``."""
        return self.dual_lr

    def plan(self, per_step: int = 1) -> BatchPlan:
        """Return the batch plan: random reshuffling, so many minibatches a step, labelled and unlabelled rows in proportion."""
        return BatchPlan(
            size=self.batch_size, steps=self.steps, epochs=self.epochs, per_step=per_step, stratified="proportional"
        )

    def local_steps(self, mean_examples: float) -> int:
        """Return K: ``steps``, or those of a client with the mean number of examples."""
        return self.steps or (self.epochs or 1) * max(1, math.ceil(mean_examples / self.batch_size))

    def rates(self, t: int, parts: tuple[str, ...]) -> Scalar:
        """Return the learning rates with which round t begins, one a part of ``z``."""
        units = (self.epochs or 1) if self.lr_schedule.by == "epoch" else 1
        now = self.lr_schedule.at(t * units, units)
        dual = self.lr if self.dual_lr is None else self.dual_lr
        return {p: (dual if p == "y" else self.lr) * now for p in parts}
