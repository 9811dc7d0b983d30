"""The sets Lambda that an agnostic learner's mixture weights may come from, and their Euclidean projections.

Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019, section 4; the projection onto the simplex is that of Duchi et
al., ICML 2008, that onto the hull of points Wolfe's, Math. Programming 11 (1976). All vectors are float64 (p,), p domains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedfleet.simulator.author import imported

TOLERANCE = 1e-9
LEAST = 1e-300
LISTED = 10


class LambdaSet(Protocol):
    """A convex set of mixtures of p domains."""

    def project(self, v: Tensor) -> Tensor:
        """Return the nearest mixture (p,) to ``v`` (p,)."""
        ...

    def best(self, losses: Tensor) -> Tensor:
        """Return a mixture (p,) under which the expected loss is largest, an extreme point."""
        ...

    def contains(self, mixture: Tensor, tolerance: float = TOLERANCE) -> bool:
        """Say whether a mixture is in the set."""
        ...


def support_max(of: LambdaSet, losses: Tensor) -> float:
    """Return the largest expected loss over the set: the agnostic loss of a model with these losses (p,)."""
    return float(of.best(losses) @ losses)


def initial(of: LambdaSet, sizes: Tensor) -> Tensor:
    """Return the mixture of the set nearest to the share of the domains' examples, ``sizes`` (p,)."""
    shares = sizes / sizes.sum()
    return shares if of.contains(shares) else of.project(shares)


def project_simplex(v: Tensor) -> Tensor:
    """Return the nearest point of the simplex to ``v`` (p,), in O(p log p)."""
    ordered = v.sort(descending=True).values
    thresholds = (ordered.cumsum(0) - 1) / torch.arange(1, len(v) + 1, dtype=v.dtype)
    return (v - thresholds[int((ordered > thresholds).sum()) - 1]).clamp(min=0)


def _falling_to_one(at: Callable[[float], Tensor], first: float, last: float) -> Tensor:
    """Bisect for the theta between ``first`` and ``last`` at which ``at(theta)`` sums to 1, and return it; the sum falls."""
    for _ in range(200):
        theta = (first + last) / 2
        if theta in (first, last):
            break
        first, last = (theta, last) if float(at(theta).sum()) > 1 else (first, theta)
    return at((first + last) / 2)


def _is_mixture(mixture: Tensor, tolerance: float) -> bool:
    return abs(float(mixture.sum()) - 1) <= tolerance and float(mixture.min()) >= -tolerance


@dataclass(frozen=True)
class Simplex:
    """All mixtures of p domains, or of some of them: a face. ``members`` (p,) is a mask."""

    members: Tensor

    def project(self, v: Tensor) -> Tensor:
        """Project onto the simplex of the members; others get 0."""
        return torch.zeros_like(v).masked_scatter(self.members, project_simplex(v[self.members]))

    def project_entropy(self, logs: Tensor) -> Tensor:
        """Return the mixture nearest to exp(``logs``) by relative entropy."""
        return logs.masked_fill(~self.members, -torch.inf).softmax(0)

    def best(self, losses: Tensor) -> Tensor:
        """Return the vertex of the member with the largest loss."""
        worst = int(losses.masked_fill(~self.members, -torch.inf).argmax())
        return torch.zeros_like(losses).index_fill(0, torch.tensor(worst), 1.0)

    def contains(self, mixture: Tensor, tolerance: float = TOLERANCE) -> bool:
        """Say whether a mixture is in the set."""
        return _is_mixture(mixture, tolerance) and float(mixture[~self.members].abs().sum()) <= tolerance


@dataclass(frozen=True)
class Capped:
    """Mixtures between ``low`` (p,) and ``high`` (p,). Raises ValueError where there are none."""

    low: Tensor
    high: Tensor

    def __post_init__(self) -> None:
        least, most = float(self.low.sum()), float(self.high.sum())
        if not (
            (self.low >= 0).all() and (self.low <= self.high).all() and least <= 1 + TOLERANCE <= most + 2 * TOLERANCE
        ):
            raise ValueError(
                f"no mixture is between low (sum {least:g}) and high (sum {most:g}): 0 <= low <= high, sums around 1"
            )

    def project(self, v: Tensor) -> Tensor:
        """Return clip(v - theta, low, high), theta by bisection such that it sums to 1."""
        first, last = float((v - self.high).min()), float((v - self.low).max())
        return _falling_to_one(lambda theta: self._clipped(v - theta), first, last)

    def project_entropy(self, logs: Tensor) -> Tensor:
        """Return the mixture nearest to exp(``logs``) by relative entropy: clip(exp(logs - theta), low, high)."""
        spread = logs - logs.max()
        least = float(spread[spread.isfinite()].min()) - 1 - math.log(len(logs))
        room = max(1 - float(self.low.sum()), LEAST)  # no more than this is above low where the exponentials sum to it
        most = float(spread.logsumexp(0)) - math.log(room)
        return _falling_to_one(lambda theta: self._clipped((spread - theta).exp()), least, most)

    def corners(self) -> Tensor:
        """Return the extreme points (r, p): all weights but one at an end. Raises ValueError where they are too many to list."""
        count = len(self.low)
        if count > LISTED:
            raise ValueError(
                f"chi2_sign: plus lists the corners of a capped set, and can for {LISTED} domains, not {count}: use simplex"
            )
        at_high = (torch.arange(1 << count)[:, None] >> torch.arange(count)) & 1 > 0
        ends = torch.where(at_high, self.high, self.low)
        rest = 1 - (
            ends.sum(1, keepdim=True) - ends
        )  # (2^p, p): what is left for each domain, the others at their ends
        row, free = ((rest >= self.low - TOLERANCE) & (rest <= self.high + TOLERANCE)).nonzero().T
        return ends[row].scatter(1, free[:, None], rest[row, free][:, None]).round(decimals=12).unique(dim=0)

    def _clipped(self, v: Tensor) -> Tensor:
        return v.maximum(self.low).minimum(self.high)

    def best(self, losses: Tensor) -> Tensor:
        """Start from ``low`` and fill up the domains with the largest losses first."""
        order = losses.argsort(descending=True, stable=True)
        room = (self.high - self.low)[order]
        left = 1 - float(self.low.sum())
        filled = (left - (room.cumsum(0) - room)).clamp(min=0).minimum(room)
        return self.low.index_add(0, order, filled)

    def contains(self, mixture: Tensor, tolerance: float = TOLERANCE) -> bool:
        """Say whether a mixture is in the set."""
        inside = (mixture >= self.low - tolerance) & (mixture <= self.high + tolerance)
        return _is_mixture(mixture, tolerance) and bool(inside.all())


@dataclass(frozen=True)
class Hull:
    """The convex hull of finitely many mixtures, the rows of ``vertices`` (r, p); of one, that point."""

    vertices: Tensor

    def __post_init__(self) -> None:
        for row, vertex in enumerate(self.vertices):
            if not _is_mixture(vertex, TOLERANCE):
                raise ValueError(f"vertex {row} is no mixture: its numbers must be at least 0 and sum to 1")

    def project(self, v: Tensor) -> Tensor:
        """Return the nearest point of the hull, by Wolfe's algorithm."""
        return nearest(self.vertices - v) @ self.vertices

    def best(self, losses: Tensor) -> Tensor:
        """Return the vertex with the largest expected loss."""
        return self.vertices[int((self.vertices @ losses).argmax())]

    def contains(self, mixture: Tensor, tolerance: float = TOLERANCE) -> bool:
        """Say whether a mixture is in the set."""
        return float((self.project(mixture) - mixture).norm()) <= tolerance


def nearest(points: Tensor, gap: float = 1e-12) -> Tensor:
    """Return the weights (r,) of the point of the hull of ``points`` (r, p) nearest to 0 (Wolfe 1976), up to a duality gap."""
    chosen = [int(points.square().sum(1).argmin())]
    weights = torch.ones(1, dtype=points.dtype)
    result = points[chosen[0]]
    for _ in range(10 * len(points) + 10):
        along = (result - points) @ result
        new = int(along.argmax())
        if float(along[new]) <= gap * max(1.0, float(result.norm())) or new in chosen:
            break
        chosen.append(new)
        weights = torch.cat([weights, torch.zeros(1, dtype=points.dtype)])
        while True:
            wanted = _affine(points[chosen])
            if float(wanted.min()) > 0:
                weights = wanted
                break
            falling = wanted <= 0
            step = min(1.0, float((weights / (weights - wanted))[falling].min()))
            weights = (weights + step * (wanted - weights)).clamp(min=0)
            kept = weights > 1e-14
            chosen = [c for c, keep in zip(chosen, kept.tolist(), strict=True) if keep]
            weights = weights[kept] / weights[kept].sum()
        result = weights @ points[chosen]
    return torch.zeros(len(points), dtype=points.dtype).index_copy(0, torch.tensor(chosen), weights)


def _affine(points: Tensor) -> Tensor:
    """Return the weights (r,), which sum to 1, of the point nearest to 0 on the plane through ``points`` (r, p)."""
    first, others = points[:1], points[1:]
    result = torch.linalg.lstsq((others - first).T, -first.T, driver="gelsd").solution[:, 0]
    return torch.cat([1 - result.sum()[None], result])


def chi2(mixture: Tensor, sizes: Tensor) -> float:
    """Return chi2(lambda || m) = sum_k (lambda_k - m_k)^2 / m_k for the shares m of the sizes (p,), Eq. (6)."""
    shares = sizes / sizes.sum()
    return float(((mixture - shares).square() / shares).sum())


def skewness(of: LambdaSet, sizes: Tensor) -> float:
    """Return max chi2(lambda || m) + 1 over the extreme points of a set: m / min_k m_k on the whole simplex."""
    shares = sizes / sizes.sum()
    if isinstance(of, Simplex):
        return float((1 / shares[of.members]).max())
    if isinstance(of, Hull):
        return max(chi2(vertex, sizes) for vertex in of.vertices) + 1
    raise ValueError("the skewness of a capped simplex is not known in closed form")


def radius(of: LambdaSet) -> float:
    """Return the largest Euclidean norm in a set, R_Lambda; for a capped simplex a bound, reached where a corner is at its caps."""
    if isinstance(of, Capped):  # lambda^2 <= (low + high) lambda - low high between the two
        ends = of.low + of.high
        return math.sqrt(support_max(of, ends) - float(of.low @ of.high))
    return float(of.vertices.norm(dim=1).max()) if isinstance(of, Hull) else 1.0


def soft_best(losses: Tensor, sizes: Tensor, mu: float) -> Tensor:
    """Return argmax over the simplex of <lambda, L> - mu chi2(lambda || m): the shares times 1 + (L - nu) / (2 mu), cut at 0."""
    shares = sizes / sizes.sum()
    first, last = float(losses.min()) - 2 * mu, float(losses.max()) + 2 * mu
    at = lambda nu: (shares * (1 + (losses - nu) / (2 * mu))).clamp(min=0)  # noqa: E731
    result = _falling_to_one(at, first, last)
    return result / result.sum()


class Bonus(Protocol):
    """The least concave function over a set that is mu chi2(lambda || m) at its extreme points.

    The maximum of a convex function is at an extreme point, so that max <lambda, L> + mu chi2 is max <lambda, L> + this.
    """

    def value(self, mixture: Tensor) -> float:
        """Return it at a mixture (p,)."""
        ...

    def gradient(self, mixture: Tensor) -> Tensor:
        """Return a supergradient (p,)."""
        ...

    def best(self, losses: Tensor) -> Tensor:
        """Return the extreme point with the largest expected loss, this included."""
        ...


@dataclass(frozen=True)
class Offsets:
    """On a simplex it is linear: ``each`` (p,)."""

    of: Simplex
    each: Tensor

    def value(self, mixture: Tensor) -> float:
        """Return <mixture, each>."""
        return float(mixture @ self.each)

    def gradient(self, mixture: Tensor) -> Tensor:
        """Return what each domain's loss is raised by."""
        return self.each

    def best(self, losses: Tensor) -> Tensor:
        """Return the vertex with the largest sum."""
        return self.of.best(losses + self.each)


@dataclass(frozen=True)
class Envelope:
    """On the hull of ``vertices`` (r, p) with the values ``at`` (r,) there: the best way to mix a mixture, a linear programme."""

    vertices: Tensor
    at: Tensor

    def _solved(self, mixture: Tensor) -> Any:
        linprog = imported("scipy.optimize").linprog  # here, for it takes its time

        ways = torch.cat([self.vertices.T, torch.ones(1, len(self.at), dtype=self.at.dtype)])
        wanted = torch.cat([mixture, mixture.sum()[None]])
        return linprog(-self.at.numpy(), A_eq=ways.numpy(), b_eq=wanted.numpy())

    def value(self, mixture: Tensor) -> float:
        """Return max <a, at> over the weights a of the vertices that make up the mixture."""
        return -float(self._solved(mixture).fun)

    def gradient(self, mixture: Tensor) -> Tensor:
        """Return the prices of the programme."""
        return torch.from_numpy(-self._solved(mixture).eqlin.marginals[:-1])

    def best(self, losses: Tensor) -> Tensor:
        """Return the vertex with the largest sum."""
        return self.vertices[int((self.vertices @ losses + self.at).argmax())]


def bonus(of: LambdaSet, sizes: Tensor, mu: float) -> Bonus:
    """Return what chi2 with the sign plus comes to on a set. Raises ValueError where its extreme points are too many."""
    if isinstance(of, Simplex):
        return Offsets(of, mu * (sizes.sum() / sizes - 1))
    vertices = of.corners() if isinstance(of, Capped) else of.vertices if isinstance(of, Hull) else None
    assert vertices is not None
    return Envelope(vertices, mu * torch.tensor([chi2(v, sizes) for v in vertices], dtype=vertices.dtype))


def face(members: Sequence[int], domains: int) -> Simplex:
    """Return the simplex of some of the domains."""
    return Simplex(torch.zeros(domains, dtype=torch.bool).index_fill(0, torch.tensor(list(members)), True))


def simplex(domains: int) -> Simplex:
    """Return the simplex of all domains."""
    return Simplex(torch.ones(domains, dtype=torch.bool))
