"""The server's calls of an algorithm, which must not change what they are given.

A round may be tried again, or its model evaluated beside the next round. States are laid out as they will be when they are
read from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfleet.simulator import authored
from fedfleet.simulator.algorithm import Algorithm, Problem, Round
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.side_effects import untouched


def initial(algorithm: Algorithm, z: Tree, seed: int, problem: Problem) -> Any:
    """Return an algorithm's state at the initial tree ``z``. Raises Impure."""
    with untouched("the algorithm's init", z):
        return T.as_new(algorithm.init(z, rng.fold(rng.key(seed), "init"), problem))


def after(algorithm: Algorithm, state: Any, turn: Round) -> tuple[Any, Mapping[str, float]]:
    """Return the state after a round, and its metrics. Raises Impure, and what the round does."""
    with untouched("the algorithm's round", state):
        found = algorithm.round(state, turn)
    new, metrics = authored.pair(found, "the algorithm's round", "(state, metrics), such as z, {}")
    return T.as_new(new), metrics


def skipped(algorithm: Algorithm, state: Any, turn: Round) -> Any:
    """Return the state after a round that too few have answered. Raises Impure."""
    with untouched("the algorithm's skipped", state):
        return T.as_new(algorithm.skipped(state, turn))


def model(algorithm: Algorithm, state: Any) -> Tree:
    """Return the model that is evaluated. Raises Impure."""
    with untouched("the algorithm's view 'global'", state):
        return algorithm.views["global"].params(state)
