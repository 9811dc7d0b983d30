"""Rows that each local step of each client of a block sees, drawn from keys: the same for every executor."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.population import LocalData
from fedfleet.simulator.work import BatchPlan, Phase

FEW = 8  # so many times fewer values than all are found without sorting all
OVERFLOW = 1e-18
"""Probability, at most, that more examples are drawn for a batch than it has rows: those above are left out."""


class BatchSchedule(NamedTuple):
    """The walk of C clients through their data, padded to T steps of R = per_step * B rows.

    Attributes:
        rows: (C, T, R) int64, row numbers into the block's data.
        weight: (C, T, R) float32, 0 on padding.
        active: (C, T) bool, false once a client has done all its steps.
        epoch: (C, T) int64, the local epoch the step begins in.
        epoch_end: (C, T) bool, whether the step ends an epoch.
        key: (C, T) int64, the step's own key.

    """

    rows: Tensor
    weight: Tensor
    active: Tensor
    epoch: Tensor
    epoch_end: Tensor
    key: Key


def _batches(plan: BatchPlan, counts: Tensor, longest: int) -> tuple[int, Tensor]:
    """Return the rows of a full batch, and the batches of each client's epoch."""
    size = longest if plan.size is None else min(plan.size, longest)
    return size, (counts + (size - 1)).div(size, rounding_mode="floor")


@functools.cache
def capacity(size: int) -> int:
    """Return the rows that a batch of ``size`` examples on average, each drawn for itself, needs but for ``OVERFLOW``.

    That is of the Poisson law, whose tail is above that of the binomial law of the same mean (Anderson & Samuels 1967).
    """
    rows, tail = size, 1.0
    while tail > OVERFLOW:
        rows += 1
        first = math.exp((rows + 1) * math.log(size) - size - math.lgamma(rows + 2))  # of rows + 1
        tail = first / (1 - size / (rows + 2))  # the rest of the series falls faster than this one
    return rows


def steps_of(plan: BatchPlan, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local steps of clients with ``counts`` (S,) examples under a plan, and the batches of their epochs."""
    _, an_epoch = _batches(plan, counts, int(counts.max()))
    return _steps(plan, an_epoch, None), an_epoch


def _steps(plan: BatchPlan, an_epoch: Tensor, steps: int | None) -> Tensor:
    """Return the local steps of each client."""
    wanted = steps if steps is not None else plan.steps
    if wanted is not None:
        return torch.full_like(an_epoch, wanted)
    return (an_epoch * int(plan.epochs or 1) + plan.per_step - 1).div(plan.per_step, rounding_mode="floor")


def work(phase: Phase, counts: Tensor, steps: int | None = None) -> tuple[Tensor, Tensor]:
    """Return what a phase asks of clients with ``counts`` (S,) int64 examples: local steps (S,), and examples in them (S,).

    What is no work, such as a look at examples that are held out, counts for nothing.

    Args:
        phase: the phase.
        counts: examples of each client.
        steps: replaces the steps of its batch plans.

    """
    total, examples = torch.zeros_like(counts), torch.zeros_like(counts)
    if not len(counts):  # nobody may be asked where each client is drawn for itself
        return total, examples
    for plan in (stage.batches for stage in phase.work.loops if stage.batches.works):
        _, an_epoch = _batches(plan, counts, int(counts.max()))
        mine = _steps(plan, an_epoch, steps)
        whole = (mine * plan.per_step).div(an_epoch, rounding_mode="floor")
        size = counts if plan.size is None else torch.full_like(counts, plan.size).minimum(counts)
        total, examples = total + mine, examples + whole * counts + (mine * plan.per_step - whole * an_epoch) * size
    return total, examples


def least_first(values: Tensor, wanted: int) -> Tensor:
    """Return the positions of at least the ``wanted`` least values (..., n) in order, equal ones by position."""
    if wanted * FEW < values.shape[-1]:
        least, order = values.topk(wanted + 1, largest=False)
        if not (least[..., 1:] == least[..., :-1]).any():  # among equal ones it chooses as it likes
            return order[..., :wanted]
    return values.argsort(dim=-1, stable=True)


def schedule(
    plan: BatchPlan,
    rows: Tensor,
    counts: Tensor,
    keys: Key,
    steps: int | None = None,
    limit: Tensor | None = None,
    labelled: Tensor | None = None,
    by_domain: Tensor | None = None,
) -> BatchSchedule:
    """Lay out local steps.

    Args:
        plan: the batch plan.
        rows: (C, n) int64, each client's rows, padded.
        counts: (C,) int64 real rows.
        keys: (C,) one key a client and stage.
        steps: replaces ``plan.steps`` (a random K of this round).
        limit: (C,) int64 steps after which each client stops, if it has not finished.
        labelled: (C,) int64 real rows that have labels, the first ones; None where all have.
        by_domain: (C, p) int64 real rows of each domain, one after the other; None where that is not told.

    """
    clients, n = rows.shape
    size, an_epoch = _batches(plan, counts, n)  # the last batch of an epoch may be short
    mine = _steps(plan, an_epoch, steps)
    if limit is not None:
        mine = mine.minimum(limit)
    total = max(1, int(mine.max()))
    batch = torch.arange(total * plan.per_step, device=rows.device).expand(clients, -1)  # (C, T * per_step)
    last = (mine * plan.per_step - 1).clamp(min=0).div(an_epoch, rounding_mode="floor")
    # A client done with its steps starts no new epoch: beside a far larger one it would be shuffled a great many times.
    epoch = batch.div(an_epoch[:, None], rounding_mode="floor").minimum(last[:, None])
    within = batch % an_epoch[:, None]
    place = within[..., None] * size + torch.arange(size, device=rows.device)  # (C, T * per_step, B)
    if plan.drawn:
        place = _drawn(plan, counts, n, rng.fold(keys[:, None], "drawn", batch))
        size = place.shape[-1]
    real = place < counts[:, None, None]
    place = place * real
    spread = None if plan.stratified is None else labelled
    if plan.stratified == "domains" and by_domain is not None:
        place, real = _by_domain(plan, batch, by_domain, size, keys)
    elif plan.stratified == "proportional" and labelled is not None:
        place, real = _stratified(plan, batch, counts, labelled, size, keys)
    elif (plan.shuffle and not plan.drawn) or spread is not None:
        epochs = int(epoch.max()) + 1
        numbers = torch.arange(n, device=rows.device)
        if plan.shuffle:
            order = rng.bits(rng.fold(keys[:, None], "epoch", torch.arange(epochs, device=rows.device)), n)  # (C, E, n)
            order.masked_fill_((numbers >= counts[:, None])[:, None], torch.iinfo(torch.int64).max)
            order = least_first(order, int(place.max()) + 1 if spread is None else n)
        else:
            order = numbers.expand(clients, epochs, n)
        if spread is not None:
            order = _spread(order, counts, spread)
        width = order.shape[-1]
        if epochs > 1:
            place = epoch[..., None] * width + place
        place = order.flatten(1).gather(1, place.flatten(1)).reshape(place.shape)
    result = rows.gather(1, place.flatten(1)).reshape(clients, total, plan.per_step * size)
    by_step = lambda v: v.reshape(clients, total, plan.per_step)  # noqa: E731
    return BatchSchedule(
        rows=result,
        weight=real.to(torch.float32).reshape(clients, total, plan.per_step * size),
        active=torch.arange(total, device=rows.device) < mine[:, None],
        epoch=by_step(epoch)[..., 0],
        epoch_end=(by_step(within) == an_epoch[:, None, None] - 1).any(-1),
        key=rng.fold(keys[:, None], "step", torch.arange(total, device=rows.device)),
    )


def _drawn(plan: BatchPlan, counts: Tensor, longest: int, keys: Key) -> Tensor:
    """Return which examples are in batches (C, T) with those keys, rising (C, T, R), each drawn for itself; then numbers above all.

    From one that is in to the next it is a geometric number of examples.
    """
    assert plan.size is not None
    share = (plan.size / counts.double().clamp(min=1)).clamp(max=1.0)[:, None, None]
    u = 1.0 - rng.uniform(keys, min(capacity(plan.size), longest), torch.float64)  # in (0, 1]
    passed = (u.log() / torch.log1p(-share)).clamp(max=float(longest)).floor()  # none where all are in: log(0) is -inf
    return (passed + 1).cumsum(-1).to(torch.int64) - 1


def walked(
    phase: Phase, local: LocalData, keys: Key, steps: int | None = None, limit: Tensor | None = None
) -> tuple[BatchSchedule, ...]:
    """Return the walks of clients with ``keys`` (C,) through the stages of a phase; ``limit`` (C,) is of all stages together."""
    walks: list[BatchSchedule] = []
    left = None if limit is None else limit.to(local.counts.device)
    for s, stage in enumerate(phase.work.loops):
        plan, key = stage.batches, rng.fold(keys, "stage", s)
        if not plan.works:
            assert local.held is not None or not plan.held_out  # or the run would have been refused
            rows, counts = local.held if plan.held_out and local.held else (local.rows, local.counts)
            walks.append(schedule(plan, rows, counts, key))
            continue
        told = local.labelled, local.by_domain
        walks.append(schedule(plan, local.rows, local.counts, key, steps, left, *told))
        left = None if left is None else left - walks[-1].active.sum(1)
    return tuple(walks)


def ends(schedule: BatchSchedule, most: int) -> BatchSchedule:
    """Return a walk of ``most`` steps, the first half of them and the last, where it has more."""
    if schedule.weight.shape[1] <= most:
        return schedule
    return BatchSchedule._make(torch.cat([x[:, : most // 2], x[:, -(most // 2) :]], 1) for x in schedule)


def wider(schedule: BatchSchedule, per_step: int, *, first: bool) -> BatchSchedule:
    """Return a walk whose batches have one row more, of weight 0: the first, or the last, of all that a client sees."""
    seen = schedule.rows.flatten(1)
    more = (seen.amin(1) if first else seen.amax(1))[:, None, None, None], schedule.weight.new_zeros(())
    rows, weight = (
        torch.cat([of, filling.expand(*of.shape[:-1], 1)], -1).flatten(-2)  # (C, T, per_step, B)
        for filling, of in zip(
            more, (v.unflatten(-1, (per_step, -1)) for v in (schedule.rows, schedule.weight)), strict=True
        )
    )
    return schedule._replace(rows=rows, weight=weight)


def _spread(order: Tensor, counts: Tensor, labelled: Tensor) -> Tensor:
    """Return orders (C, E, n) of clients' rows in which each kind comes at equal distances, and in the order that it had."""
    first = order < labelled[:, None, None]
    rank = torch.where(first, first.cumsum(-1), (~first).cumsum(-1))  # within its kind, from 1
    others = torch.where(first, (counts - labelled)[:, None, None], labelled[:, None, None])
    at = (2 * rank - 1) * others  # of (2 rank - 1) / (2 of its kind), over a common denominator
    padding = torch.arange(order.shape[-1], device=order.device) >= counts[:, None, None]
    return order.gather(-1, at.masked_fill(padding, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True))


def _stratified(
    plan: BatchPlan, batch: Tensor, counts: Tensor, labelled: Tensor, size: int, keys: Key
) -> tuple[Tensor, Tensor]:
    """Return the places (C, T * per_step, B) of batches that hold both kinds of examples in proportion, and which are real.

    A batch goes on where the one before ended in each kind, which is shuffled anew each time it is gone through.
    """
    rows = counts.clamp(max=size)  # real ones of a batch
    mine = (rows * labelled).div(counts, rounding_mode="floor")
    at = torch.arange(size, device=counts.device).expand(len(counts), -1)  # (C, B)
    result = []
    for kind, (each, of, before) in enumerate(((mine, labelled, 0 * mine), (rows - mine, counts - labelled, mine))):
        so_far = batch[..., None] * each[:, None, None] + (at - before[:, None])[:, None]  # (C, T * per_step, B)
        some = of.clamp(min=1)[:, None, None]
        turn, place = so_far.clamp(min=0).div(some, rounding_mode="floor"), so_far.clamp(min=0) % some
        result.append(_shuffled(rng.fold(keys, "kind", kind), of, turn, place) if plan.shuffle else place)
    places = torch.where((at < mine[:, None])[:, None], result[0], labelled[:, None, None] + result[1])
    real = (at < rows[:, None])[:, None].expand(places.shape)
    return torch.where(real, places, torch.zeros_like(places)), real


def _by_domain(plan: BatchPlan, batch: Tensor, by_domain: Tensor, size: int, keys: Key) -> tuple[Tensor, Tensor]:
    """Return the places (C, T * per_step, B) of batches that hold as many rows of each domain, and which are real.

    A batch goes on where the one before ended in each domain, which is shuffled anew each time it is gone through. One with
    fewer rows than its part of a batch is gone through more than once there.
    """
    there = by_domain > 0
    domains = there.sum(1)
    each = by_domain.sum(1).clamp(max=size).div(domains.clamp(min=1), rounding_mode="floor").clamp(min=1)[:, None]
    at = torch.arange(size, device=by_domain.device).expand(len(by_domain), -1)  # (C, B)
    part = at.div(each, rounding_mode="floor")
    last = (domains - 1).clamp(min=0)[:, None]
    domain = (~there).to(torch.int64).argsort(dim=1, stable=True).gather(1, part.minimum(last))
    so_far = batch[..., None] * each[:, None] + (at - part * each)[:, None]  # (C, T * per_step, B)
    some = by_domain.gather(1, domain).clamp(min=1)[:, None]
    turn, inside = so_far.div(some, rounding_mode="floor"), so_far % some
    if plan.shuffle:
        for d in range(by_domain.shape[1]):
            mine = (domain == d)[:, None]
            zero = torch.zeros_like(turn)
            where = torch.where(mine, turn, zero), torch.where(mine, inside, zero)
            inside = torch.where(mine, _shuffled(rng.fold(keys, "domain", d), by_domain[:, d], *where), inside)
    first = (by_domain.cumsum(1) - by_domain).gather(1, domain)
    real = (part < domains[:, None])[:, None].expand(so_far.shape)
    return torch.where(real, first[:, None] + inside, torch.zeros_like(inside)), real


def _shuffled(keys: Key, counts: Tensor, turn: Tensor, place: Tensor) -> Tensor:
    """Return where ``place`` (C, T, B) goes in the order of its ``turn`` (C, T, B) through ``counts`` (C,) examples."""
    n, turns = max(1, int(counts.max())), int(turn.max()) + 1
    order = rng.bits(rng.fold(keys[:, None], "epoch", torch.arange(turns, device=counts.device)), n)
    padding = torch.arange(n, device=counts.device) >= counts[:, None]
    order = order.masked_fill(padding[:, None], torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
    return order.flatten(1).gather(1, (turn * n + place).flatten(1)).reshape(place.shape)
