"""Options of ``tune``: a search for hyper-parameters."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field

from fedfleet.config.checking import unknown
from fedfleet.config.search import Choice, Distribution, space
from fedfleet.simulator.driver.evaluation import less_is_better
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.registry import Options

MORE = re.compile(r"accuracy|auc|(^|[_/])f1(_|$)|precision|recall|score(_|$)|information", re.IGNORECASE)
"""Names of metrics of which more is better for certain; of losses and the like ``less_is_better`` knows."""
VARIES = "say what varies, such as --search algorithm.lr=loguniform(1e-3, 1)"
TOP = 3
"""Times that rounds are multiplied by ``reduction`` from the first rung to the last, unless ``min_rounds`` is given."""


class Tuning(Options):
    """A search: what varies and between what, what is to be good, how many trials, and which of them go on."""

    search: dict[str, Any] = Field(default={})
    """Dotted key -> distribution: "uniform(a, b)", "loguniform(a, b)", "quniform(a, b, step)", "randint(a, b)", "lograndint(a, b)"
    (both ends included), "choice(v, w, ...)" or a list of values. A label of ``compare`` may set its own: ``tune.search.KEY``."""
    metric: str
    """What is compared, such as ``eval/validation_accuracy``."""
    goal: Literal["max", "min"] | None = None
    """Whether more or less of it is better; where its name says so (accuracy, loss), that if not given."""
    of: Literal["last", "best"] = "last"
    """Which evaluation counts: the last by the rung, or the best up to there."""
    trials: Annotated[int, Field(ge=1)] | None = None
    """How many configurations are drawn; a grid has its own number."""
    searcher: Literal["random", "grid", "tpe"] = "random"
    """Who draws: chance, a grid of every combination of choices, or, from what was found so far, Optuna's tree-structured Parzen
    estimator."""
    scheduler: Literal["sha", "asha", "none"] = "sha"
    """Which trials go on at a rung: the best once all have come there (successive halving), each that is among the best so far (its
    asynchronous form), or all, without rungs."""
    min_rounds: Annotated[int, Field(ge=1)] | None = None
    """Rounds to the first rung; ``rounds`` / ``reduction``³, but at least 1, if not given."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """One in so many goes on at a rung, and each rung is after so many times the rounds."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of what is drawn; those of the runs are ``seeds`` or ``seed``, the same for all trials."""


def checked(options: Tuning, rounds: int) -> dict[str, Distribution]:
    """Return what is searched, after all that can be refused without data. Raises ConfigError."""
    if not options.search:
        raise ConfigError(f"tune.search: not given: {VARIES}")
    result = space(options.search)
    if options.searcher == "grid":
        for key, distribution in result.items():
            if not isinstance(distribution, Choice):
                raise ConfigError(
                    f"tune.search.{key}={options.search[key]!r}: a grid takes choices alone: list its values"
                )
        if options.trials is not None:
            raise ConfigError(f"tune.trials={options.trials}: a grid has every combination: leave it out")
    elif options.trials is None:
        raise ConfigError(
            "tune.trials: not given: say how many configurations are to be drawn, or take tune.searcher=grid, which tries every "
            "combination of choices"
        )
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: nothing is learnt: give more")
    if options.scheduler == "none" and options.min_rounds is not None:
        raise ConfigError(f"tune.min_rounds={options.min_rounds}: scheduler none has no rungs: leave it out")
    if options.scheduler == "none" and "reduction" in options.model_fields_set:
        raise ConfigError(f"tune.reduction={options.reduction}: scheduler none has no rungs: leave it out")
    if options.min_rounds is not None and options.min_rounds > rounds:
        raise ConfigError(f"tune.min_rounds={options.min_rounds}: there are {rounds} rounds: give fewer")
    return result


def goal(options: Tuning) -> Literal["max", "min"]:
    """Return which way the metric is better. Raises ConfigError where nobody says."""
    if options.goal is not None:
        return options.goal
    if less_is_better(options.metric):
        return "min"
    if MORE.search(options.metric):
        return "max"
    raise ConfigError(
        f"tune.goal: not given, and {options.metric!r} does not say whether more is better: give max or min"
    )


def rungs(options: Tuning, rounds: int) -> list[int]:
    """Return after how many rounds trials are compared, ascending; the last are all of them.

    Rung k is after min_rounds · reduction^k rounds, as in successive halving, and the last one after ``rounds``, whatever that is;
    one that is nearer to it than √reduction times is left out.
    """
    if options.scheduler == "none":
        return [rounds]
    least = options.min_rounds or max(1, round(rounds / options.reduction**TOP))
    result = []
    while least < rounds and least * math.sqrt(options.reduction) <= rounds:
        result.append(least)
        least *= options.reduction
    return [*result, rounds]


def check_measured(options: Tuning, names: list[str]) -> None:
    """Refuse a metric that is never measured, or of which nobody says what is better. Raises ConfigError."""
    if options.metric not in names:
        raise ConfigError(unknown("tune.metric", options.metric, names))
    if options.of == "best" and (goal(options) == "min") != less_is_better(options.metric):
        kept = "least" if less_is_better(options.metric) else "greatest"
        raise ConfigError(
            f"tune.of='best': of {options.metric!r} runs keep the {kept} value, as by its name: choose last"
        )
    goal(options)
