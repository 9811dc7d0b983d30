"""Options under ``transforms``, the orders that are allowed, needs and breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from fedfleet.middleware.compression.codecs.registry import TRANSFORMS
from fedfleet.middleware.compression.codecs.vectors import Options as Plain
from fedfleet.middleware.facts import Break, Fact, Need
from fedfleet.simulator.errors import ConfigError, show
from fedfleet.simulator.registry import ByPath, Options
from fedfleet.simulator.work import only_scales

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
        """Return what it says of itself, as those of ``codecs.vectors.Options`` do, or what they say if nothing is said."""
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
        if moving and step.does.error_feedback:
            raise ConfigError(
                f"{step.key}.error_feedback=true: {moving[0]} leaves other coordinates each time, so that what is "
                f"lost cannot be remembered: give it to the first transform, whose memory is of all that comes after it"
            )
        _check_way(way, step, [other.name for other in before])


def _check_way(way: str, step: Step, before: list[str]) -> None:
    """Refuse what has no meaning on one of the ways. Raises ConfigError."""
    key, name = step.key, step.name
    if way == "up":
        if name == "delta":
            raise ConfigError(f"{key}.name='delta': on the way up a model is sent as a difference anyhow: leave it out")
        return
    if step.says("upward"):
        raise ConfigError(f"{key}.name={name!r}: it is for what clients send: leave it out")
    if name == "delta" and before:
        raise ConfigError(
            f"{key}.name='delta': what is left of a model by {before[0]} has no difference: let delta be the first"
        )
    if step.does.error_feedback:
        raise ConfigError(
            f"{key}.error_feedback=true: on the way down delta remembers what is lost: put that first instead"
        )
    if step.says("partial") and "delta" not in before:
        raise ConfigError(f"{key}.name={name!r}: what it leaves of a model is none: put delta before it")


FEEDBACK = (Fact.COHORTS, Fact.OWN_ROUND, Fact.STATES_ALIKE, Fact.SEEN, Fact.ONCE)
"""Facts without which clients cannot owe what was lost; the last two are told by a trial alone."""


def needs(up: Sequence[Step], down: Sequence[Step]) -> Iterator[Need]:
    """Yield what transforms need."""
    yield from (Need(f"{step.key}.error_feedback=true", FEEDBACK) for step in up if step.does.error_feedback)
    if down and down[0].name == "delta":
        yield Need(f"{down[0].key}.name='delta'", (Fact.COHORTS, Fact.OWN_ROUND), "transforms.down")


def breaks(up: Sequence[Step], down: Sequence[Step]) -> Iterator[Break]:
    """Yield what transforms take away."""
    if up:
        key = f"transforms.up={show([step.name for step in up])}"
        yield Break(Fact.UNTOUCHED, "it changes what clients send on its way", key)
        yield Break(Fact.EXACT, "the server adds up what is left of what clients send", key)
    for step in up:
        if not only_scales(step.does):
            why = "what it makes of messages does not add up"
            yield Break(Fact.SCALED_ONLY, why, f"{step.key}.name={step.name!r}", "choose clip")
    if down:
        key = f"transforms.down={show([step.name for step in down])}"
        yield Break(Fact.OWN_MODEL, "clients start from what is left of the server's model", key)
