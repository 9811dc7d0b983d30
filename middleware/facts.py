"""Facts of a run, needed by some parts of a configuration and taken away by others: refusals are made of the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from fedfleet.middleware.trial import Seen
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic.reduction import ByDomainMean, CollectUploads, Mean, Total
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.work import Phase, only_scales


class Fact(Enum):
    """A fact of a run, there unless something takes it away; the value ends a sentence that begins with "it needs"."""

    COHORTS = "clients that answer in cohorts"
    UNIFORM = "clients that are drawn uniformly"
    EVEN = "all clients to be invited equally often"
    ALL_HEARD = "everybody who is online to be heard"
    OWN_ROUND = "answers to count in their own round"
    ONCE = "to ask a client once in an exchange"
    SEEN = "to see in a trial of two rounds what clients send in every phase"
    STATELESS = "clients that keep no state"
    STATES_ALIKE = "clients that keep a state in all phases or in none"
    LASTING = "answers that are of use in later rounds"
    ONE_MODEL = "clients to send a model alone, of which the mean is the next one"
    MODELS = "clients to send models, or how far they moved"
    AVERAGED = "models, or how far they moved, to be averaged or kept"
    SUMS = "plain means and sums of what clients send"
    ALIKE = "every client to count alike"
    KNOWN_WEIGHTS = "weights that clients do not say themselves"
    UNSCALED = "that no client counts for many"
    SCALED_ONLY = "messages that are at most scaled on their way, so that they add up"
    UNTOUCHED = "messages that nothing changes on their way"
    EXACT = "the server to add up just what clients send"
    EACH_SEEN = "the server to see what each client sends"
    COMPUTED = "each client to send what it has computed"
    OWN_MODEL = "clients to start from the server's own model"
    UNROUNDED = "noise that is not rounded"
    NORMS = "messages that get no longer by rounding"
    UNLOOKED = "clients to be asked whatever their losses are"
    COUNTS_HIDDEN = "clients to be asked whatever they hold"
    LOSSES_HIDDEN = "nothing to depend on what is measured on clients"
    ALL_KEPT = "no client to be left out for what it sends"
    FINITE = "what is sent to be finite"
    NO_STATISTICS = "a net whose layers keep no statistics"
    LABELLED = "labels at every client"
    NOT_BY_LABELS = "who is online not to depend on labels"
    CLEAN = "clients with the examples they were dealt"
    SADDLE = "an algorithm that says between what it plays"
    CONVEX = "a convex loss"


@dataclass(frozen=True)
class Need:
    """Something that needs facts.

    Attributes:
        what: what it is called: a key with its value, or an algorithm's name.
        facts: all of these.
        leave: the key to leave out to do without; by default that of ``what``. Empty where there is none.

    """

    what: str
    facts: tuple[Fact, ...]
    leave: str | None = None

    @property
    def without(self) -> str:
        """The key to leave out."""
        return self.what.partition("=")[0] if self.leave is None else self.leave


@dataclass(frozen=True)
class Break:
    """Something that takes a fact away.

    Attributes:
        fact: the fact.
        why: how, the first half of a sentence.
        key: what is written in the configuration that does; None for the algorithm itself.
        fix: what to choose instead; "" where leaving it out is all that helps.

    """

    fact: Fact
    why: str
    key: str | None = None
    fix: str = ""


def clashes(needs: Iterable[Need], breaks: Iterable[Break]) -> Iterator[tuple[Need, Break]]:
    """Yield what is needed together with what takes it away."""
    result = list(breaks)
    for need in needs:
        yield from ((need, b) for fact in need.facts for b in result if b.fact is fact)


def refusal(need: Need, by: Break) -> str:
    """Return the line that refuses both together: key, reason, what to do."""
    what = "it" if by.key is None else need.what
    keys = [key for key in ("" if by.fix or by.key is None else by.key.partition("=")[0], need.without) if key]
    fix = by.fix or ("choose fedavg" if by.key is None else "")
    mends = [text for text in (fix, f"leave {' or '.join(keys)} out" if keys else "") if text]
    return f"{by.key or need.what}: {by.why}, and {what} needs {by.fact.value}: {', or '.join(mends)}"


class Clash(ConfigError):
    """A need that something takes away."""

    def __init__(self, need: Need, by: Break):
        super().__init__(refusal(need, by))
        self.fact = by.fact


def check(needs: Iterable[Need], breaks: Iterable[Break]) -> None:
    """Refuse what needs something that something else takes away. Raises Clash."""
    for need, by in clashes(needs, breaks):
        raise Clash(need, by)


def of_algorithm(algorithm: Algorithm, name: str, weight: str | None = None) -> Iterator[Break]:
    """Yield what an algorithm takes away, as far as it can be told without running it.

    ``weight`` is the key that says how clients count, where there is one.
    """
    if algorithm.asynchronous:
        yield Break(Fact.COHORTS, f"{name} is asynchronous")
    if algorithm.saddle is None:
        yield Break(Fact.SADDLE, f"{name} plays between no two", fix="choose afl")
    yield from _of_what_is_sent(algorithm, name)
    stateful = [p.name for p in algorithm.phases if p.client_state is not None]
    if stateful:
        yield Break(
            Fact.STATELESS, f"clients of {name} keep a state in phase {stateful[0]!r}, which moves on meanwhile"
        )
    if stateful and len(stateful) < len(algorithm.phases):
        yield Break(Fact.STATES_ALIKE, f"clients of {name} keep a state in some phases and not in others")
    for phase in algorithm.phases:
        yield from _of_phase(phase, name, weight)


def _of_what_is_sent(algorithm: Algorithm, name: str) -> Iterator[Break]:
    slots = {slot: reduction for p in algorithm.phases for slot, reduction in p.reduce.items()}
    moving = {slot: slots.get(slot) for p in algorithm.phases if (slot := p.model or p.difference)}
    first = next(iter(algorithm.phases), None)
    if len(algorithm.phases) > 1 or len(slots) > 1:
        yield Break(Fact.ONE_MODEL, f"clients of {name} send {', '.join(slots)}")
    elif first is None or first.model is None or not isinstance(slots.get(first.model), Mean):
        yield Break(Fact.ONE_MODEL, f"{name} does not say that the mean of clients' models is the next one")
    if not moving:
        yield Break(Fact.MODELS, f"clients of {name} send no models")
    if not moving or not {type(r) for r in moving.values()} <= {Mean, CollectUploads} or algorithm.asynchronous:
        yield Break(Fact.AVERAGED, f"{name} averages no models of a cohort")


def _of_phase(phase: Phase, name: str, weight: str | None) -> Iterator[Break]:
    for slot, reduction in phase.reduce.items():
        where = f"slot {slot!r} (phase {phase.name!r})"
        if isinstance(reduction, CollectUploads):
            yield Break(Fact.SUMS, f"{name} keeps what each client sends of {where}")
        elif isinstance(reduction, ByDomainMean):
            yield Break(Fact.SUMS, f"{name} adds up {where} by domain")
        elif type(reduction) not in (Mean, Total):
            yield Break(Fact.SUMS, f"{name} reduces {where} by {type(reduction).__name__}")
    if phase.weight != "uniform":
        key = None if weight is None else f"{weight}={phase.weight!r}"
        fix = "" if weight is None else f"set {weight}=uniform"
        yield Break(Fact.ALIKE, f"{name} weighs clients by what they have or say ({phase.weight})", key, fix)
    if phase.weight not in ("uniform", "num_examples"):
        yield Break(Fact.KNOWN_WEIGHTS, f"clients of {name} tell a weight of their own ({phase.weight})")
    if phase.reweighted:
        fix = "choose an algorithm without such weights"
        yield Break(Fact.UNSCALED, f"{name} multiplies what rarely heard clients send", fix=fix)
    if phase.uplink:
        yield Break(Fact.UNTOUCHED, f"{name} changes what clients send on its way")
    if not all(map(only_scales, phase.uplink)):
        yield Break(Fact.SCALED_ONLY, f"{name} changes what clients send on its way")
    if phase.dated:
        yield Break(
            Fact.LASTING, f"what clients of {name} send in phase {phase.name!r} is of use in its own round alone"
        )


def of_trial(algorithm: Algorithm, seen: Seen, name: str) -> Iterator[Break]:
    """Yield what a trial of an algorithm shows that it takes away."""
    if seen.repeated:
        yield Break(Fact.ONCE, f"{name} may ask one twice in phase {min(seen.repeated)!r}")
    for phase in (p.name for p in algorithm.phases if p.name not in seen.sent):
        yield Break(Fact.SEEN, f"{name} has not come to phase {phase!r}")
