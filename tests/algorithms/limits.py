"""Exact limits of algorithms on quadratics: each round is an affine map of the state, and its law is that of the cohorts.

A map is read off the algorithm's own round, played by the engine at the origin and at the unit vectors. All of these points are
entries of one leaf, so that one run plays every cohort.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import Bowl, Game, World, records
from scripted import BOWLS, GAMES, Scripted
from torch import Tensor

from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.fleet.responses import Federation

Cohort = tuple[int, ...]


class Bowls(Bowl):
    """The same quadratics at several points, the entries of ``w``."""

    def _loss(self, z, batch, ctx, key):
        a, m = (column[:, None] for column in batch.x.unbind(-1))
        return batch.mean((a * (z["x"]["w"] - m) ** 2 / 2).sum(-1)), {}


class Games(Game):
    """The same games at several points, the entries of ``x`` and ``y``."""

    def _loss(self, z, batch, ctx, key):
        a, b, c, p, q = (column[:, None] for column in batch.x.unbind(-1))
        x, y = z["x"]["x"], z["y"]["y"]
        return batch.mean((a * x**2 / 2 + b * x * y - c * y**2 / 2 + p * x + q * y).sum(-1)), {}


MANY_BOWLS, MANY_GAMES = World(Bowls(), BOWLS.population), World(Games(), GAMES.population)
IN_CLUSTERS = World(Bowls(), replace(BOWLS.population, domain=torch.tensor([0, 0, 1, 1])))


@dataclass(frozen=True)
class Law:
    """A random affine map x -> A x + b: chances (n,) of each up to a factor, A (n, d, d), b (n, d)."""

    chance: Tensor
    a: Tensor
    b: Tensor

    @property
    def _share(self) -> Tensor:
        return self.chance / self.chance.sum()

    @property
    def mean(self) -> Tensor:
        """Return the stationary mean (d,)."""
        a = torch.einsum("n,nij->ij", self._share, self.a)
        assert float(torch.linalg.eigvals(a).abs().max()) < 1
        return torch.linalg.solve(torch.eye(len(a), dtype=a.dtype) - a, self._share @ self.b)

    @property
    def sd(self) -> Tensor:
        """Return the stationary standard deviations (d,): C = E[A C A'] + E[r r'], r = A mean + b - mean."""
        r = self.a @ self.mean + self.b - self.mean
        d = r.shape[1]
        twice = torch.einsum("n,nij,nkl->ikjl", self._share, self.a, self.a).reshape(d * d, d * d)
        assert float(torch.linalg.eigvals(twice).abs().max()) < 1
        noise = torch.einsum("n,ni,nj->ij", self._share, r, r).flatten()
        c = torch.linalg.solve(torch.eye(d * d, dtype=r.dtype) - twice, noise)
        return c.view(d, d).diag().sqrt()


def cohorts(p: Sequence[float], alike: Sequence[int] | None = None) -> Iterator[tuple[float, Cohort]]:
    """Return who may be heard, with the chance of it, but for nobody; of clients that are alike, their number decides."""
    chances: dict[Any, tuple[float, Cohort]] = {}
    for mask in itertools.product((False, True), repeat=len(p)):
        heard = tuple(i for i, on in enumerate(mask) if on)
        chance = 1.0
        for on, c in zip(mask, p, strict=True):
            chance *= c if on else 1 - c
        if heard and chance:
            key = heard if alike is None else tuple(sorted(alike[i] for i in heard))
            before, first = chances.get(key, (0.0, heard))
            chances[key] = before + chance, first
    yield from chances.values()


def restarting(made: Algorithm, change: Callable[[Any], Any] = lambda state: state) -> Algorithm:
    """Return an algorithm all of whose rounds begin at its first state, changed."""
    start: Any = None

    def init(z: Any, key: Any, problem: Any) -> Any:
        nonlocal start
        start = change(made.init(z, key, problem))
        return start

    return made._replace(init=init, round=lambda state, rnd: made.round(start, rnd))


def law(
    made: Algorithm,
    world: World,
    rows: Iterable[tuple[float, Sequence[Cohort]]],
    told: Sequence[float],
    size: int,
    write: Callable[[Any, Tensor], Any] | None = None,
    read: Callable[[Any], Tensor] | None = None,
) -> Law:
    """Return the law of an algorithm's round.

    Args:
        made: the algorithm; clients keep no state.
        world: ``MANY_BOWLS`` or the like.
        rows: who is heard in each phase of a round, and the chance of it.
        told: the chances of the clients that the algorithm is told.
        size: d, how many numbers the state has.
        write: ``(state, x) -> state`` with its numbers taken from x (d, points); they are the model's if not given.
        read: ``state -> x``, its inverse.

    """
    chances, heard = zip(*rows, strict=True)
    points = torch.cat([torch.zeros(size, 1), torch.eye(size)], 1).double()

    def model(state: Any) -> Tensor:
        z = made.views["global"].params(state)
        return torch.stack([leaf for part in z.values() for leaf in part.values()])

    fixed = restarting(made, lambda state: state if write is None else write(state, points))
    z = {"x": {"w": points[0]}} if world.task.parts == ("x",) else {"x": {"x": points[0]}, "y": {"y": points[1]}}
    availability = Scripted([here for row in heard for here in row], told)
    given = {"z": z, "inner": "batched", "federation": Federation(availability=availability)}
    ends = torch.stack([(read or model)(r.state) for r in records(fixed, world, len(heard), **given)])
    b = ends[:, :, 0]
    return Law(torch.tensor(chances, dtype=torch.float64), ends[:, :, 1:] - b[:, :, None], b)
