"""How the clients of a phase are cut into blocks, and how many of these go to a worker as one task.

Blocks depend on the configuration and the clients alone. What a task has of them may depend on the workers, for the order in
which blocks are added does not: a worker adds those that it has, and the driver has less to take and to add.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfleet.simulator.block.batches import work
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.fleet.late import Assignment
from fedfleet.simulator.work import Phase

LARGE_BYTES = 1 << 20  # of what clients are sent, and so about of what they send: below it a result costs little
ROOMS = 16  # sizes to which blocks are filled: with fewer, more is waste; with more, it takes longer until each has come often
TASKS = 4  # a worker, or more, so that workers end at about the same time


def in_order(phase: Phase, asked: Assignment) -> Tensor:
    """Return the order of clients: most steps first, then most examples. Those of a block are alike, and no long one comes last."""
    order = asked.num_examples.argsort(descending=True, stable=True)
    if asked.limit is not None:  # elsewhere who has more examples takes no fewer steps
        steps, _ = work(phase, asked.num_examples, asked.steps)
        order = order[steps.minimum(asked.limit)[order].argsort(descending=True, stable=True)]
    return order


def sizes_of_blocks(clients: int, most: int) -> list[int]:
    """Cut clients into blocks of at most so many, as equal as can be. Several are even in number: two workers end together."""
    count = math.ceil(clients / most)
    count = min(clients, count + count % 2) if count > 1 else 1
    each, more = divmod(clients, count)
    return [each + 1] * more + [each] * (count - more)


def rooms_of_blocks(clients: int, most: int) -> tuple[int, ...]:
    """Return the sizes to which blocks of at most so many are filled, of up to so many clients who answer.

    They are steps of a sixteenth of the largest there may be, so that little is wasted, and the size where all answer, so that
    nothing is then.
    """
    return tuple(sorted({*range(most, 0, -math.ceil(most / ROOMS)), sizes_of_blocks(clients, most)[0]}))


def blocks_a_task(blocks: int, workers: int, size: int) -> int:
    """Return how many of so many blocks go as one task, a power of two, where messages have ``size`` bytes."""
    if size < LARGE_BYTES or workers < 2:
        return 1
    return 1 << max(0, (blocks // (TASKS * workers)).bit_length() - 1)


def cut(task: BlockTask, blocks: list[int], together: int) -> list[BlockTask]:
    """Cut work into tasks of so many blocks, which have so many clients each."""
    tasks, before = [], 0
    for i in range(0, len(blocks), together):
        mine = tuple(blocks[i : i + together])
        tasks.append(task.part(torch.arange(before, before + sum(mine)))._replace(sizes=mine))
        before += sum(mine)
    return tasks
