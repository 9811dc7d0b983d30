"""Styles of a batch as StableFDG changes them: styles of another client, cluster centres, exploration.

Park, Han, Kim, Wang, Brinton & Moon, "StableFDG: style and attention based learning for federated domain
generalization", NeurIPS 2023, and its released code. The style of an example is the mean and the deviation of each
channel of its feature maps, by ``mixstyle.py``:

    released code                     here
    half of 32 rows are shared        n // 2 of the n rows that count, drawn; the first 16 of a loader's batch are not
                                      there
    KMeans, k-means++, max_iter 1     plain D^2 seeding (Arthur & Vassilvitskii 2007) and one step of Lloyd's;
                                      scikit-learn tries several candidates a seed and moves empty clusters, which only
                                      equal styles can make
    centres in the order of seeding   the same, to rows in random order
    new deviations                    clipped at 0, those of exploration not
    exploration level 3               factor: m + 3 (m - mean of the batch), the same of deviations
    the first place whose coin falls  alone appends copies; later ones mix what is there
    copies                            one each to the rarest classes of the batch that it has, in random order, until
                                      all are dealt
    normalisation                     differentiated through where styles are explored, not where they are shared

Everything is drawn from the key that is given. Rows that do not count are neither drawn nor looked at. Shapes are
fixed: ``copies`` rows are there from the first place on, and begin to count where they are made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import clusters
from fedfleet.simulator.arithmetic.clusters import pick
from fedfleet.simulator.author import Key, rng
from fedfleet.tasks.mixstyle import kept, style


class Change(NamedTuple):
    """How styles of a batch are changed.

    Attributes:
        share, explore: probabilities that styles are shared, and that they are explored and mixed at a place.
        copies: rows that are appended.
        factor: how far their styles are moved away from the mean style.
        alpha: of the Beta distribution of what a mixed row keeps of its own style.
        foreign: mean and deviation (2, 2 C) over another client's examples of their styles; all 0 for none.

    """

    share: float
    explore: float
    copies: int
    factor: float
    alpha: float
    foreign: Tensor


class Rows(NamedTuple):
    """Feature maps (B, C, ...), labels (B,), weights (B,) that say which rows count, whether copies have been made."""

    maps: Tensor
    y: Tensor
    weight: Tensor
    explored: Tensor


def styles(maps: Tensor) -> Tensor:
    """Return the styles (B, 2 C) of feature maps (B, C, ...): means, then deviations."""
    return torch.cat(style(maps), dim=1)


def restyled(maps: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """Return maps (B, C, ...) of mean and deviation ``old`` with those of ``new``, (B, C) each."""
    each = (*maps.shape[:2], *(1 for _ in maps.shape[2:]))
    mean, deviation, new_mean, new_deviation = (v.view(each) for v in (*old, *new))
    return (maps - mean) / deviation * new_deviation + new_mean


def centres(key: Key, points: Tensor, real: Tensor, used: Tensor, most: int) -> Tensor:
    """Return cluster centres (most, D) of the points (B, D) that are ``real`` (B,), of which the first ``used`` count.

    k-means++ seeding, and then one step of Lloyd's algorithm.
    """
    seeds, apart = clusters.seeded(key, points, real, most)
    among = torch.arange(most, device=points.device) < used
    return clusters.centres(clusters.members(torch.where(among[:, None], apart, torch.inf), real), points, seeds)


def shared(key: Key, maps: Tensor, weight: Tensor, change: Change) -> Tensor:
    """Return maps (B, C, ...) with new styles: cluster centres of the batch's own, and draws around another client's."""
    real, rows = weight > 0, len(maps)
    old = style(maps.detach())
    n = real.sum()
    used = n - n // 2
    most = rows - rows // 2
    own = centres(rng.fold(key, "centres"), torch.cat(old, 1), real, used, most)
    mean, deviation = change.foreign
    drawn = mean + deviation * rng.normal(rng.fold(key, "foreign"), (rows, len(mean)), maps.dtype)
    drawn = torch.where(torch.arange(len(mean), device=maps.device) < maps.shape[1], drawn, drawn.clamp(min=0))
    place = (real.cumsum(0) - 1).index_select(0, rng.partners(rng.fold(key, "rows"), real)).clamp(min=0)
    own = own.index_select(0, place.clamp(max=most - 1))
    new = torch.where((place < used)[:, None], own, drawn.index_select(0, place))
    wanted = rng.bernoulli(rng.fold(key, "batch"), change.share) & (deviation > 0).any()
    return torch.where(wanted, restyled(maps, old, new.split(maps.shape[1], dim=1)), maps)  # type: ignore[arg-type]


def balanced(key: Key, y: Tensor, real: Tensor, classes: int, copies: int) -> Tensor:
    """Return rows (copies,) to repeat, of ``real`` (B,) ones with labels y (B,): each of the class that there are fewest of."""
    member = (torch.arange(classes, device=y.device)[:, None] == y) & real  # (classes, B)
    number = member.sum(1)
    tie = rng.uniform(rng.fold(key, "class"), (classes, copies), torch.float64)
    turn = number[:, None] + torch.arange(copies, device=y.device) + tie  # the i-th copy of a class finds it so large
    turn = torch.where(number[:, None] > 0, turn, torch.inf)
    of = turn.flatten().argsort()[:copies] // copies
    return pick(rng.uniform(rng.fold(key, "row"), copies, torch.float64), member.index_select(0, of).to(torch.float64))


def with_room(key: Key, maps: Tensor, y: Tensor, weight: Tensor, classes: int, copies: int) -> tuple[Rows, Tensor]:
    """Return ``copies`` rows, which do not count yet, before those of the batch, and which of these they repeat (copies,).

    They come first, so that what is drawn for them does not depend on how many rows the batch is padded to.
    """
    of = balanced(key, y, weight > 0, classes, copies)
    more = Rows(
        torch.cat([maps.index_select(0, of), maps]),
        torch.cat([y.index_select(0, of), y]),
        torch.cat([torch.zeros_like(weight[:1]).expand(copies), weight]),
        torch.zeros((), dtype=torch.bool, device=maps.device),
    )
    return more, of


def explored(key: Key, rows: Rows, of: Tensor, change: Change) -> Rows:
    """Return rows with their styles mixed, with a probability; the first time this is so, copies count from here on.

    Args:
        key: of the place.
        rows: copies, and then the batch.
        of: which row of the batch each copy repeats (copies,).
        change: what is done.

    """
    n = len(of)
    now = rng.bernoulli(rng.fold(key, "batch"), change.explore)
    first = now & ~rows.explored
    maps = torch.cat([torch.where(first, rows.maps[n:].index_select(0, of), rows.maps[:n]), rows.maps[n:]])
    there = rows.weight.amax() * first
    weight = torch.cat([torch.maximum(rows.weight[:n], there), rows.weight[n:]])
    old, before = style(maps), styles(maps.detach())
    counts = (rows.weight[n:] > 0)[:, None]
    mean = torch.where(counts, before[n:], 0.0).sum(0) / counts.sum().clamp(min=1)
    beyond = before[:n] + change.factor * (before[:n] - mean)
    new = torch.cat([torch.where(first, beyond, before[:n]), before[n:]])
    share = kept(rng.fold(key, "share"), len(new), change.alpha).to(maps.dtype)[:, None]
    new = share * new + (1 - share) * new.index_select(0, rng.partners(rng.fold(key, "partner"), weight > 0))
    mixed = restyled(maps, old, new.split(maps.shape[1], dim=1))  # type: ignore[arg-type]
    return Rows(torch.where(now, mixed, maps), rows.y, weight, rows.explored | first)
