"""Sharding of a phase: its clients are cut into blocks, and some blocks go to a worker as one task.

Blocks depend on the configuration and the clients alone. The number of blocks in a task may depend on the workers,
since the order in which blocks are added does not. A worker adds its own blocks, and a node adds what its workers
have. So the driver has less to receive and to add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from fedfleet.simulator.block.batches import work
from fedfleet.simulator.block.task import BlockParting, BlockTask
from fedfleet.simulator.executors.base import Host
from fedfleet.simulator.fleet.late import Assignment
from fedfleet.simulator.work import Phase

LARGE_BYTES = 1 << 20  # of what clients are sent, and so about of what they send: below it a result costs little
BUCKETS = 16  # sizes to which blocks are filled: with fewer, more is waste; with more, it takes longer until each has come often
TASKS = 4  # a worker, or more, so that workers end at about the same time
APART_BYTES = (
    4 << 20
)  # likewise, from which on a result stays on its node until it is asked for: Ray's replies hold no more
RESULTS = 2  # a node, or more, so that the driver takes the first while others are at work


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


def bucket_sizes(clients: int, most: int) -> tuple[int, ...]:
    """Return the sizes to which blocks of at most so many are filled, of up to so many clients who answer.

    They are steps of a sixteenth of the largest there may be, so that little is wasted, and the size where all answer, so that
    nothing is then.
    """
    return tuple(sorted({*range(most, 0, -math.ceil(most / BUCKETS)), sizes_of_blocks(clients, most)[0]}))


def blocks_a_task(blocks: int, workers: int, size: int) -> int:
    """Return how many of so many blocks go as one task, a power of two, where messages have ``size`` bytes."""
    if size < LARGE_BYTES or workers < 2:
        return 1
    return 1 << max(0, (blocks // (TASKS * workers)).bit_length() - 1)


def parts_a_task(parts: int, nodes: int, size: int) -> int:
    """Return how many of so many parts go to one node as one task, a power of two, where messages have ``size`` bytes."""
    if size < APART_BYTES or nodes < 2:
        return 1
    return 1 << max(0, (parts // (RESULTS * nodes)).bit_length() - 1)


def shared_out(
    phase: Phase, task: BlockTask, blocks: list[int], hosts: Sequence[Host], size: int
) -> tuple[list[BlockTask], BlockParting | None]:
    """Cut the work of blocks of so many clients each for workers and their nodes, where messages have ``size`` bytes.

    Return the tasks, and how the workers of a node share one; None where one is for one worker. For nobody each block is a task.
    """
    if not hosts:
        return task.cut(blocks, 1), None
    each = blocks_a_task(len(blocks), sum(h.workers for h in hosts), size)
    parts = parts_a_task(-(-len(blocks) // each), sum(h.workers > 0 for h in hosts), size)
    return task.cut(blocks, each * parts), BlockParting(phase.reduce, each) if parts > 1 else None
