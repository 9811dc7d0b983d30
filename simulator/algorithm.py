"""Contracts between an algorithm, a task and the rounds of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.domains import Domains
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.work import Batch, LocalWork, Message, Objective, Phase


@dataclass(frozen=True)
class Problem:
    """The federation an algorithm runs on.

    Attributes:
        clients: N.
        mean_examples: the mean number of examples a client.
        num_examples: the number of examples of each of some clients, int64 of the shape of their numbers.
        domains: which of them belong together.
        sources, targets: the clients that hold labelled, and unlabelled, examples (n,) int64; None where all are labelled.

    """

    clients: int
    mean_examples: float
    num_examples: Callable[[Tensor], Tensor] | None = None
    domains: Domains | None = None
    sources: Tensor | None = None
    targets: Tensor | None = None

    def among(self, role: Role) -> Problem:
        """Return the federation of the clients of a role alone, numbered by their places in ``sources`` or ``targets``.

        Raises ConfigError where no domain is a target.
        """
        ids = self.sources if role == "source" else self.targets
        if ids is None:
            raise ConfigError(
                "domains.target: the algorithm tells clients with labels from those without: say which domains are targets"
            )
        of = self.num_examples
        return Problem(len(ids), self.mean_examples, None if of is None else lambda clients: of(ids[clients]))


S = TypeVar("S")
Role = Literal["source", "target"]


@dataclass(frozen=True)
class Cohort:
    """Invited clients.

    Attributes:
        clients: (S,) int64.
        copies: (S,) int64, numbers repeated ones (all 0 without replacement).
        weights: (S,) float64, the factor by which the server counts each answer, whatever the phase's own weight; None for 1.
            Clients are not told.

    """

    clients: Tensor
    copies: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.clients)


def _as_it_was(state: Any, rnd: Any) -> Any:
    return state


def positions(clients: Tensor, among: Tensor) -> Tensor:
    """Return where clients (R,) stand among others (S,), each of which is there once, in any order, and all of the R are."""
    order = among.argsort()
    return order[torch.searchsorted(among[order], clients)]


class Reduced(NamedTuple):
    """What a phase yields: reduced slots, the heard clients (R,) in the order of the blocks, their message scalars (R,).

    ``unit`` (R,) float64 is what an answer counts where the phase gives it no weight: 1, less for a late one, times the weight
    that its cohort gives it.
    """

    values: Mapping[str, Any]
    received: Tensor
    config: Mapping[str, Tensor]
    unit: Tensor

    def __getitem__(self, slot: str | int | slice) -> Any:  # type: ignore[override]
        """Return a reduced slot by name. Raises ValueError where no client's slot of that name was reduced."""
        if not isinstance(slot, str):
            return tuple.__getitem__(self, slot)
        if slot not in self.values:
            raise ValueError(f"no slot {slot!r} was reduced, only {', '.join(self.values)}: put it into Phase.reduce")
        return self.values[slot]


class Done(NamedTuple):
    """What the server's own work yields: reduced slots, as of a phase with one client, and what it keeps for the next time."""

    values: Mapping[str, Any]
    client_state: Tree


class Buffer(NamedTuple):
    """When an asynchronous server steps, and who works for it meanwhile.

    Attributes:
        size: answers a step; whoever answers is replaced at that moment.
        seconds: virtual seconds a step, in the place of ``size``; whoever answers is replaced when the next step begins.
        concurrency: clients at work at any time; None: all.
        max_staleness: rounds after which an answer is thrown away; None keeps all.

    """

    size: int = 1
    seconds: float | None = None
    concurrency: int | None = None
    max_staleness: int | None = None

    def at_work(self, clients: int) -> int:
        """Return how many of so many clients work at any time."""
        return clients if self.concurrency is None else min(self.concurrency, clients)

    def answers(self, clients: int) -> int:
        """Return how many answers of so many clients a step has, at most."""
        return self.size if self.seconds is None else self.at_work(clients)


class Buffered(NamedTuple):
    """What came of the answers in a buffer whose clients were sent the message of ``staleness`` rounds ago."""

    staleness: int
    reduced: Reduced


class Round(Protocol):
    """What the engine offers an algorithm in one round."""

    @property
    def index(self) -> int:
        """Round number t, from 0."""
        ...

    @property
    def key(self) -> Key:
        """A key of the round, for the server's own draws."""
        ...

    @property
    def problem(self) -> Problem:
        """The federation."""
        ...

    def invite(self, size: int, *, replace: bool = False, role: Role | None = None) -> Cohort:
        """Invite a cohort; where all alike are drawn, the n-th call of a round for as many is the same for every algorithm.

        Args:
            size: how many clients, S.
            replace: whether one may come several times.
            role: of the clients that hold labelled ("source") or unlabelled ("target") examples alone.

        Raises ConfigError for a role where no domain is a target.
        """
        ...

    def draw(self, size: int, clients: Callable[[int, Key], Tensor]) -> Cohort:
        """Invite as many as ``size`` would, drawn by ``clients(number, key)``, some perhaps more than once."""
        ...

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Send ``shared`` to the cohort, let those heard work, reduce what they send.

        Args:
            phase: one of the algorithm's.
            shared: what all are sent.
            cohort: those invited (S,).
            client_input: what each is sent besides, leaves (S, ...).
            steps: replaces the local steps of the phase's batch plans.

        What clients draw, minibatches and noise, is other in each exchange of a round, and the same in the n-th of any algorithm's.
        """
        ...

    def chances(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Tensor:
        """Return the chance (S,) float64 that each of a cohort answers if it is asked now.

        Args: as of ``map_reduce``, which is to be called next. A server that goes on after the first answers hears less.
        Algorithms that ask say so (``Algorithm.chances``). Raises ConfigError where the model of availability does not tell.
        """
        ...

    def buffered(
        self,
        phase: Phase,
        *,
        messages: Mapping[int, Message],
        buffer: Buffer,
        weights: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Buffered]:
        """Let time pass until the buffer is full, or its time is over.

        Args:
            phase: one of the algorithm's.
            messages: round -> what clients invited in it are sent.
            buffer: the algorithm's (``Algorithm.asynchronous``).
            weights: ``clients (R,) -> factors (R,)`` by which the server counts their answers; None for 1.

        A client is sent the message of the round it is invited in, so ``messages`` must hold this round's and those of
        ``versions``. What comes back is reduced version by version, the present one first.
        """
        ...

    def versions(self) -> set[int]:
        """Return the rounds whose messages clients are still at work on."""
        ...

    def online(self, cohort: Cohort) -> Tensor:
        """Return which clients of a cohort are online now, a mask (S,): those of them that are invited next are found so."""
        ...

    def hand_back(
        self, phase: Phase, result: Reduced, *, shared: Message, client_state: Callable[[Mapping[str, Any]], Tree]
    ) -> None:
        """Send something more to the clients that answered a phase, which keep ``client_state(shared)`` as their state.

        Args:
            phase: one of the algorithm's, whose clients keep a state.
            result: what ``map_reduce`` returned for it in this round.
            shared: what is sent.
            client_state: ``shared -> state``, made as that of the phase.

        It is counted with that phase of this round, takes no time and does not fail, for they are there.
        """
        ...

    def at_server(self, phase: Phase, *, shared: Message, client_state: Tree = None, steps: int | None = None) -> Done:
        """Do the work of one of ``Algorithm.server`` on the server's own examples, as a client does that is sent ``shared``.

        Args:
            phase: one of ``Algorithm.server``.
            shared: what a client would be sent.
            client_state: what was kept of it the last time, None at first.
            steps: replaces the local steps of the phase's batch plans.

        Nothing travels, and it takes no time.
        """
        ...


class View(NamedTuple):
    """A model to evaluate: ``params(state)`` is the tree given to the task."""

    params: Callable[[Any], Tree]


class Personal(NamedTuple):
    """How a client's own model comes about, to be evaluated on examples of its own that it has not worked on.

    Attributes:
        message: ``(state, t) -> message`` that the client is sent after round t, with the rates of that round.
        work: from that message, and what the client keeps, to its model: what ``client_final`` sends as "z". Nothing is kept of it.
        client_state: as that of the phases.
        function: the task's function that says of each example how good the model is.

    """

    message: Callable[[Any, int], Message]
    work: LocalWork
    client_state: Callable[[Mapping[str, Any]], Tree] | None = None
    function: str = "per_example"


class Saddle(NamedTuple):
    """A model and a mixture of domains, as an answer to min over models, max over mixtures.

    Attributes:
        z: the model.
        mixture: (p,) float64.
        value: ``(mixture, losses (p,)) -> value``, differentiable, of what is minimised and maximised, without the penalty.
        worst: ``losses -> value`` under the worst mixture that is allowed.
        penalty: ``z -> value`` of what the model costs itself.

    """

    z: Tree
    mixture: Tensor
    value: Callable[[Tensor, Tensor], Tensor]
    worst: Callable[[Tensor], float]
    penalty: Callable[[Tree], Tensor]


class Algorithm(NamedTuple):
    """An algorithm as values and two functions.

    Attributes:
        init: ``(z, key, problem) -> state`` from the task's initial tree.
        round: ``(state, round) -> (state, metrics)``; metrics are floats for ``rounds.parquet``. Neither changes what it is given.
        phases: constants, sent to the workers once.
        views: name -> what is evaluated; the view "global" gives ``eval/<metric>``.
        requires: parts of ``z`` that the task must have.
        domains: ``state -> values`` (p,) by name for ``domains.parquet``, an entry a domain.
        saddle: ``(state, problem) -> saddle`` that a run over domains has come to, for the duality gap.
        asynchronous: when it steps, if it draws clients from ``buffered`` alone: nothing about cohorts applies to it then.
        minimises: whether it is for tasks without a dual part alone.
        same_cohort: whether it asks the same clients in all phases where ``cohort.resample`` is false.
        convex: whether its steps are those of a theorem about convex losses.
        rounds: those that its steps are made for, if they are.
        roles: whether it tells clients with labels from those without; others are given labelled examples alone, unless the task
            is ``unlabelled``.
        buffers: whether its server averages models, so that what their layers keep count of is carried along.
        personal: how clients' own models come about, where they have such.
        chances: whether its server has to know how likely each client is to answer (``Round.chances``): "relative" up to a
            common factor, "absolute" as it is; None where it does not ask.
        server: phases that the server does itself (``Round.at_server``), on examples that are no client's: constants, too, of other
            names. What is done to clients' messages is not done to them.
        skipped: ``(state, round) -> state`` after a round that too few have answered, where such a round counts
            (``cohort.on_abort: skip``): by default the state as it was. It asks no client, and may use the round's index and key.
        name: what it is called in records and reports; by default as the function that made ``round``.

    """

    init: Callable[[Tree, Key, Problem], Any]
    round: Callable[[Any, Round], tuple[Any, Mapping[str, float]]]
    phases: tuple[Phase, ...]
    views: Mapping[str, View]
    requires: tuple[str, ...] = ("x",)
    asynchronous: Buffer | None = None
    domains: Callable[[Any], Mapping[str, Tensor]] | None = None
    saddle: Callable[[Any, Problem], Saddle] | None = None
    minimises: bool = False
    same_cohort: bool = False
    convex: bool = False
    rounds: int | None = None
    roles: bool = False
    buffers: bool = False
    personal: Personal | None = None
    server: tuple[Phase, ...] = ()
    chances: Literal["relative", "absolute"] | None = None
    skipped: Callable[[Any, Round], Any] = _as_it_was
    name: str | None = None


def beneath(algorithm: Algorithm, state_of: Callable[[Any], Any]) -> Algorithm:
    """Return an algorithm that is asked about states in which its own are, as ``state``, where ``state_of`` finds them.

    Its rounds are not yet those of such states, but what it makes of a round that is skipped is.
    """
    saddle, domains, personal = algorithm.saddle, algorithm.domains, algorithm.personal
    return algorithm._replace(
        views={name: View(lambda at, v=v: v.params(state_of(at))) for name, v in algorithm.views.items()},
        domains=domains and (lambda at: domains(state_of(at))),
        saddle=saddle and (lambda at, problem: saddle(state_of(at), problem)),
        skipped=lambda at, rnd: at._replace(state=algorithm.skipped(state_of(at), rnd)),
        personal=personal and personal._replace(message=lambda at, t: personal.message(state_of(at), t)),
    )


def layer(state: Any, kind: type[S]) -> S:
    """Return the state of a kind among those that wrappers have put around an algorithm's own, each as its ``state``."""
    while not isinstance(state, kind):
        state = state.state
    return state


class Around:
    """A round with some functions of its own; the others are those of the round that it is put around."""

    def __init__(self, rnd: Round):
        self._round = rnd

    def __getattr__(self, name: str) -> Any:
        return getattr(self._round, name)


class Exchanging(Around):
    """A round whose exchanges are those of other phases of the same names."""

    def __init__(self, rnd: Round, phases: Mapping[str, Phase]):
        super().__init__(rnd)
        self._phases = phases

    def map_reduce(
        self, phase: Phase, *, shared: Message, cohort: Cohort, client_input: Tree = None, steps: int | None = None
    ) -> Reduced:
        """Do as the round does, with the phase of that name."""
        phase = self._phases[phase.name]
        return self._round.map_reduce(phase, shared=shared, cohort=cohort, client_input=client_input, steps=steps)

    def buffered(self, phase: Phase, **given: Any) -> list[Buffered]:
        """Do as the round does, with the phase of that name."""
        return self._round.buffered(self._phases[phase.name], **given)


class Task(Protocol):
    """What is learnt. The tree ``z`` has a part a player: ``{"x": ...}``, or ``{"x": ..., "y": ...}`` for a minimax task.

    One with ``whole = True`` is evaluated on all examples of a split at once, rather than in chunks. One that has a method
    ``prepare(x, y, say) -> about`` is given the training examples before a run begins, to make ready what it measures with; one
    with ``images(z)`` has some images (n, c, h, w) of the last model kept and shown. ``model_metrics(z)``, if there, gives metrics
    of the model alone, beside those on test examples; ``probabilities(outputs)`` how likely each class is (n, classes).
    ``measured``, if there, names its metrics, so that nothing need be evaluated to know them. One with ``unlabelled = True`` learns
    from examples without labels too: in their rows ``batch.data["target"]`` (B,) is true and ``batch.y`` -1.
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of ``z``: ("x",) or ("x", "y")."""
        ...

    @property
    def objectives(self) -> Mapping[str, Objective]:
        """Objectives by name; "train" is the one algorithms use by default."""
        ...

    @property
    def functions(self) -> Mapping[str, Callable[[Tree, Batch], Any]]:
        """Forward functions by name; "predict" gives the outputs (B, ...) that ``metrics`` takes."""
        ...

    def init(self, seed: int) -> Tree:
        """Return the initial tree."""
        ...

    def metrics(self, outputs: Tree, data: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Return named metrics of the outputs (n, ...) on evaluation data (n, ...)."""
        ...
