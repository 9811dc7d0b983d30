"""Transforms of what travels: how they are written, and which are refused before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.config.reading import show
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.uplink import compressible, sizes
from fedfleet.simulator.driver.downlink import downward
from fedfleet.simulator.driver.transformed import Seen, transformed
from fedfleet.simulator.errors import ConfigError, FedfleetError
from fedfleet.simulator.registry import ByPath, Options
from fedfleet.simulator.work import Slots
from fedfleet.transforms.registry import TRANSFORMS
from fedfleet.transforms.vectors import Options as Plain

WAYS = ("up", "down")


class Transforms(Options):
    """What becomes of messages on their way, in order: names, or mappings of a name and its options."""

    up: list[Annotated[Any, TRANSFORMS]] = Field(default=[])
    """Of what a client sends: a model as its difference from the one it was sent, everything else as it is."""
    down: list[Annotated[Any, TRANSFORMS]] = Field(default=[])
    """Of what the server sends: with ``delta`` first of how it differs from what clients have."""

    @model_validator(mode="after")
    def _in_order(self) -> Transforms:
        for way in WAYS:
            given = getattr(self, way)
            if not any(isinstance(each, ByPath) for each in given):  # which say what they are once they are made
                check_order(way, [Step(f"transforms.{way}[{i}]", each.name, each) for i, each in enumerate(given)])
        if [each.name for each in self.down] == ["delta"]:
            raise ConfigError(
                "transforms.down=['delta']: a difference is as large as the model: let what makes it smaller follow"
            )
        return self


class Step(NamedTuple):
    """A transform of a configuration: what messages call it, its name, and itself."""

    key: str
    name: str
    does: Any

    def says(self, what: str) -> Any:
        """Return what it says of itself, as those of ``transforms.vectors.Options`` do, or what they say if nothing is said."""
        return getattr(self.does, what, getattr(_PLAIN, what))


_PLAIN = Plain()


def check_order(way: str, steps: Sequence[Step]) -> None:
    """Refuse transforms that cannot follow each other. Raises ConfigError."""
    for i, step in enumerate(steps):
        before = steps[:i]
        if before and before[-1].says("last"):
            raise ConfigError(
                f"{step.key}.name={step.name!r}: {before[-1].name} leaves no floats behind it: let it be the last"
            )
        moving = [other.name for other in before if other.says("moves")]
        if moving and step.does.feedback:
            raise ConfigError(
                f"{step.key}.feedback=true: {moving[0]} leaves other coordinates each time, of which nothing can be remembered: "
                f"give it to the first transform, whose memory is of all that comes after it"
            )
        _check_way(way, step, [other.name for other in before])


def _check_way(way: str, step: Step, before: list[str]) -> None:
    """Refuse what has no meaning on one of the ways. Raises ConfigError."""
    key, name = step.key, step.name
    if way == "up":
        if name == "delta":
            raise ConfigError(f"{key}.name='delta': on the way up a model is sent as a difference anyhow: leave it out")
        return
    if name == "clip":
        raise ConfigError(f"{key}.name='clip': it is for what clients send: leave it out")
    if name == "delta" and before:
        raise ConfigError(
            f"{key}.name='delta': what is left of a model by {before[0]} has no difference: let delta be the first"
        )
    if step.does.feedback:
        raise ConfigError(f"{key}.feedback=true: on the way down delta remembers what is lost: put that first instead")
    if step.says("partial") and "delta" not in before:
        raise ConfigError(f"{key}.name={name!r}: what it leaves of a model is none: put delta before it")


def sending(
    algorithm: Algorithm, up: Sequence[Step], name: str, late: str, tried: Callable[[Algorithm], Seen]
) -> Algorithm:
    """Return an algorithm with what is configured on its clients' messages' way, if anything. Raises ConfigError."""
    if not up and not remembers(algorithm):
        return algorithm
    _check_asked(up, algorithm, name, late)
    seen = tried(algorithm)
    _check_seen(up, algorithm, name, seen)
    for send in seen.sent.values():
        _check_back(up, {slot: leaves for slot, tree in send.items() if (leaves := compressible(tree))})
    return transformed(algorithm, tuple(step.does for step in up), seen)


def receiving(
    algorithm: Algorithm, down: Sequence[Step], name: str, late: str, tried: Callable[[Algorithm], Seen]
) -> Algorithm:
    """Return an algorithm with what is configured on its server's messages' way, if anything. Raises ConfigError."""
    if not down:
        return algorithm
    memory = down[0].name == "delta"
    if memory and algorithm.asynchronous:
        raise ConfigError(
            f"transforms.down[0].name='delta': {name} is asynchronous, and sends clients models of its own pace: leave it out"
        )
    if memory and late == "keep":
        raise ConfigError(
            "transforms.down[0].name='delta': with cohort.late='keep' what a late answer tells of what its client has received is "
            "of an earlier round: leave one of them out"
        )
    given = tried(algorithm).given
    if not any(given.values()):
        raise ConfigError(
            f"transforms.down={show([step.name for step in down])}: clients of {name} are sent no floats but buffers, so there is "
            f"nothing to transform: leave it out"
        )
    for of in given.values() if memory else ():
        for slot, d in of.items():
            _check_shrinks("down", down, slot, d)
    for of in given.values():
        _check_back(down[memory:], {slot: {"": torch.zeros(d)} for slot, d in of.items()})
    return downward(algorithm, tuple(step.does for step in down[memory:]), memory=memory)


def remembers(algorithm: Algorithm) -> bool:
    """Say whether something that the algorithm itself has on clients' messages' way is to have feedback."""
    return any(t.feedback for p in algorithm.phases for t in p.uplink)


def _feedback(up: Sequence[Step], algorithm: Algorithm) -> str | None:
    """Return what asks for feedback, as an error begins; None where nothing does."""
    asked = [f"{step.key}.feedback=true" for step in up if step.does.feedback]
    return (["an uplink with feedback"] if remembers(algorithm) else asked or [None])[0]


def _check_asked(up: Sequence[Step], algorithm: Algorithm, name: str, late: str) -> None:
    """Refuse feedback where clients' states cannot be what it needs. Raises ConfigError."""
    key = _feedback(up, algorithm)
    if key is None:
        return
    if algorithm.asynchronous:
        raise ConfigError(
            f"{key}: {name} is asynchronous, and a client may have sent other answers since it began the one that is used, so "
            f"that it owes something else by then: leave it out"
        )
    if late == "keep":
        raise ConfigError(
            f"{key}: with cohort.late='keep' what a client owes has moved on when a late answer is used: leave one of them out"
        )
    states = [p.own is not None for p in algorithm.phases]
    if any(states) and not all(states):
        raise ConfigError(f"{key}: clients of {name} keep a state in some phases and not in others: leave it out")


def _check_seen(up: Sequence[Step], algorithm: Algorithm, name: str, seen: Seen) -> None:
    """Refuse transforms that cannot do what they are asked to with what clients were seen to send. Raises ConfigError."""
    found = {phase: sizes(send) for phase, send in seen.sent.items()}
    unseen = [p.name for p in algorithm.phases if p.name not in found]
    if up and not unseen and not any(found.values()):
        raise ConfigError(
            f"transforms.up={show([step.name for step in up])}: clients of {name} send no floats but buffers, so there is nothing "
            f"to transform: leave it out"
        )
    largest = max((max(of.values()) for of in found.values() if of), default=0)
    for step in up:
        if not unseen and (getattr(step.does, "k", None) or 0) > largest:
            raise ConfigError(
                f"{step.key}.k={step.does.k}: clients of {name} send {largest} floats at most in a slot: lower it, or give a "
                f"share"
            )
    for of in found.values():
        for slot, d in of.items():
            _check_shrinks("up", up, slot, d)
    key = _feedback(up, algorithm)
    if key and unseen:
        raise ConfigError(
            f"{key}: what clients of {name} send in phase {unseen[0]!r} was not seen in a trial of two rounds, and so what they "
            f"will owe is of unknown size: leave it out"
        )
    if key and seen.repeated:
        raise ConfigError(
            f"{key}: {name} may ask a client twice in phase {min(seen.repeated)!r}, and what it owes can be added once: leave it "
            f"out"
        )


def _check_back(steps: Sequence[Step], slots: Slots) -> None:
    """Refuse a transform of one's own whose ``back`` makes something else of slots than they were. Raises ConfigError."""
    if all(isinstance(step.does, Plain) for step in steps):
        return
    for step in steps:
        slots = {slot: {n: torch.zeros(x.shape, dtype=x.dtype) for n, x in of.items()} for slot, of in slots.items()}
        try:
            code = step.does.code(slots, rng.key(0), {})
            back = code.back(code.rest)
        except FedfleetError:
            raise
        except Exception:  # as where it looks at what a client was sent: the run will say so
            return
        if wrong := _unlike(slots, back):
            raise ConfigError(
                f"{step.key}.name={step.name!r}: 'back' of what its 'code' returns makes {wrong}: return the slots and leaves that "
                f"'code' was given, floats of their shapes"
            )
        slots = code.rest


def _unlike(slots: Slots, back: Any) -> str | None:
    """Say how what is made of slots differs from them; None where its leaves are floats of the same names and shapes."""
    if not isinstance(back, Mapping) or set(back) != set(slots):
        return f"slots {sorted(back) if isinstance(back, Mapping) else type(back).__name__} of {sorted(slots)}"
    for slot, of in slots.items():
        mine = back[slot]
        if not isinstance(mine, Mapping) or set(mine) != set(of):
            found = sorted(mine) if isinstance(mine, Mapping) else type(mine).__name__
            return f"leaves {found} of {sorted(of)} in slot {slot!r}"
        for name, x in of.items():
            y = mine[name]
            if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
                found = (
                    f"{y.dtype} {tuple(y.shape)}".removeprefix("torch.") if isinstance(y, Tensor) else type(y).__name__
                )
                return f"{found} of a leaf {tuple(x.shape)} in slot {slot!r}"
    return None


def _check_shrinks(way: str, given: Sequence[Step], slot: str, d: int) -> None:
    """Refuse what adds more error than arrives where what is lost is sent later: for then what is owed grows without end."""
    error, turned, owing = 0.0, False, False
    for step in given:
        if owing:
            error = (1 + error) * (1 + step.says("error")(d, turned=turned)) - 1
        if error >= 1:
            raise ConfigError(
                f"{step.key}.name={step.name!r}: of the {d} numbers that it is given of slot {slot!r} its error may be "
                f"{error:.2g} times what they are, and with {'delta' if way == 'down' else 'feedback'} before it what is owed "
                f"would grow: raise its levels, or leave one of them out"
            )
        owing = owing or step.name == "delta" or step.does.feedback
        d, turned = step.says("left")(d), turned or step.says("turns")
