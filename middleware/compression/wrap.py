"""An algorithm whose messages pass transforms on their way, where what is sent lets them do what they are asked to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedfleet.middleware.compression.codecs.vectors import Options as Plain
from fedfleet.middleware.compression.down import downward
from fedfleet.middleware.compression.options import FEEDBACK, Step
from fedfleet.middleware.compression.up import transformed
from fedfleet.middleware.context import Context
from fedfleet.middleware.facts import Need, check, of_trial
from fedfleet.middleware.trial import Seen
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.uplink import compressible, sizes
from fedfleet.simulator.errors import ConfigError, FedfleetError, show
from fedfleet.simulator.work import Slots


def sending(up: Sequence[Step], algorithm: Algorithm, about: Context) -> Algorithm:
    """Return an algorithm with what is configured on its clients' messages' way, if anything. Raises ConfigError."""
    if not up and not remembers(algorithm):
        return algorithm
    seen = about.tried(algorithm)
    _check_seen(up, algorithm, about, seen)
    for send in seen.sent.values():
        _check_back(up, {slot: leaves for slot, tree in send.items() if (leaves := compressible(tree))})
    return transformed(algorithm, tuple(step.does for step in up), seen)


def receiving(down: Sequence[Step], algorithm: Algorithm, about: Context) -> Algorithm:
    """Return an algorithm with what is configured on its server's messages' way, if anything. Raises ConfigError."""
    if not down:
        return algorithm
    memory, name = down[0].name == "delta", about.name
    given = about.tried(algorithm).given
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
    return any(t.error_feedback for p in algorithm.phases for t in p.uplink)


def _feedback(up: Sequence[Step], algorithm: Algorithm) -> str | None:
    """Return what asks for feedback, as an error begins; None where nothing does."""
    asked = [f"{step.key}.error_feedback=true" for step in up if step.does.error_feedback]
    return (["an uplink with feedback"] if remembers(algorithm) else asked or [None])[0]


def _check_seen(up: Sequence[Step], algorithm: Algorithm, about: Context, seen: Seen) -> None:
    """Refuse transforms that cannot do what they are asked to with what clients were seen to send. Raises ConfigError."""
    name, result = about.name, {phase: sizes(send) for phase, send in seen.sent.items()}
    unseen = [p.name for p in algorithm.phases if p.name not in result]
    if up and not unseen and not any(result.values()):
        raise ConfigError(
            f"transforms.up={show([step.name for step in up])}: clients of {name} send no floats but buffers, so there is nothing "
            f"to transform: leave it out"
        )
    largest = max((max(of.values()) for of in result.values() if of), default=0)
    for step in up:
        if not unseen and (least := step.says("least")) > largest:
            raise ConfigError(
                f"{step.key}.k={least}: clients of {name} send {largest} floats at most in a slot: lower it, or give a "
                f"share"
            )
    for of in result.values():
        for slot, d in of.items():
            _check_shrinks("up", up, slot, d)
    if (key := _feedback(up, algorithm)) is not None:
        needs = Need(key, FEEDBACK, "" if remembers(algorithm) else None)
        check([needs], [*about.breaks, *of_trial(algorithm, seen, name)])


def _check_back(steps: Sequence[Step], slots: Slots) -> None:
    """Refuse a transform of one's own whose ``back`` makes something else of slots than they were. Raises ConfigError."""
    if all(isinstance(step.does, Plain) for step in steps):
        return
    for step in steps:
        slots = {slot: {n: torch.zeros(x.shape, dtype=x.dtype) for n, x in of.items()} for slot, of in slots.items()}
        try:
            code = step.does.encode(slots, rng.key(0), {})
            back = code.decode(code.residual)
        except FedfleetError:
            raise
        except Exception:  # as where it looks at what a client was sent: the run will say so
            return
        if wrong := _unlike(slots, back):
            raise ConfigError(
                f"{step.key}.name={step.name!r}: 'decode' of what its 'encode' returns makes {wrong}: return the slots and "
                f"leaves that 'encode' was given, floats of their shapes"
            )
        slots = code.residual


def _unlike(slots: Slots, back: Any) -> str | None:
    """Say how what is made of slots differs from them; None where its leaves are floats of the same names and shapes."""
    if not isinstance(back, Mapping) or set(back) != set(slots):
        return f"slots {sorted(back) if isinstance(back, Mapping) else type(back).__name__} of {sorted(slots)}"
    for slot, of in slots.items():
        mine = back[slot]
        if not isinstance(mine, Mapping) or set(mine) != set(of):
            result = sorted(mine) if isinstance(mine, Mapping) else type(mine).__name__
            return f"leaves {result} of {sorted(of)} in slot {slot!r}"
        for name, x in of.items():
            y = mine[name]
            if not isinstance(y, Tensor) or y.shape != x.shape or not y.is_floating_point():
                result = (
                    f"{y.dtype} {tuple(y.shape)}".removeprefix("torch.") if isinstance(y, Tensor) else type(y).__name__
                )
                return f"{result} of a leaf {tuple(x.shape)} in slot {slot!r}"
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
        owing = owing or step.name == "delta" or step.does.error_feedback
        d, turned = step.says("left")(d), turned or step.says("turns")
