"""Worlds of the specification of dropout, whose availability is played from a script or drawn by known chances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.fleet.responses import Federation
from tests.algorithms.harness import Bowl, Game, World, play, point, rows

P = (0.9, 0.5, 0.3, 0.1)
BOWLS = World(Bowl(), rows([(1.0, 0.0)], [(2.0, 1.0)], [(1.0, 4.0)], [(3.0, -1.0)]))
"""f_i = a_i (w - c_i)^2 / 2: a = (1, 2, 1, 3), c = (0, 1, 4, -1); optimum 3/7."""
OPTIMUM = 3 / 7
HEARD = ((0, 2), (0,), (0, 1), (2, 3), (0, 3), (1, 2))

P_GAME = (0.9, 0.9, 0.3, 0.3)
I, II = (1.0, 1.0, 1.0, 2.0, -1.0), (3.0, -0.5, 2.0, -4.0, 3.0)  # noqa: E741
GAMES = World(Game(), rows([I], [I], [II], [II]))
"""Two clients of either label; saddle (20/49, 36/49)."""
SADDLE = 20 / 49, 36 / 49
HEARD_1 = ((0, 2), (0, 1), (1,), (1, 3), (0, 2, 3))
HEARD_2 = ((0,), (1, 2), (0, 1), (0, 3), (1,))


@dataclass
class Scripted:
    """Clients are online as a script says, phase by phase."""

    script: Sequence[Sequence[int]]
    p: Sequence[float] = P
    asks: int = 2  # how often a phase asks
    asked: int = field(default=0)
    varies: ClassVar[bool] = False

    def online(self, key: Any, clients: Tensor, seconds: Tensor) -> Tensor:
        here = torch.tensor(self.script[self.asked // self.asks])
        self.asked += 1
        return torch.isin(clients, here)

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        return torch.tensor(self.p, dtype=torch.float64)[clients]

    def long_run(self, clients: Tensor) -> Tensor:
        return self.chance(clients, clients, clients)


@dataclass(frozen=True)
class Drawn:
    """Clients are online with chances of their own."""

    p: Sequence[float] = P
    varies: ClassVar[bool] = False

    def online(self, key: Any, clients: Tensor, seconds: Tensor) -> Tensor:
        return rng.bernoulli(rng.fold(key, "online", clients), self.chance(clients, seconds, seconds))

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        return torch.tensor(self.p, dtype=torch.float64)[clients]

    def long_run(self, clients: Tensor) -> Tensor:
        return self.chance(clients, clients, clients)


def origin() -> Any:
    return point(0.0, 0.0)


def scripted(
    algorithm: Algorithm, world: World, script: Iterable[Sequence[int]], p: Sequence[float] = P, **given: Any
) -> list[Any]:
    """Return the model after each round of a script, of as many rounds as it has phases for."""
    steps = list(script)
    rounds = len(steps) // len(algorithm.phases)
    return play(algorithm, world, rounds, federation=Federation(availability=Scripted(steps, p)), **given)


def drawn(algorithm: Algorithm, world: World, rounds: int, p: Sequence[float], **given: Any) -> list[Any]:
    """Return the model after each round of clients that are online with those chances."""
    given = {"attempts": 1000, **given}
    return play(algorithm, world, rounds, federation=Federation(availability=Drawn(p)), **given)
