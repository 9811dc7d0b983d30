"""How the clients of a phase are cut into blocks, and how many of these go to a worker as one task.

Blocks depend on the configuration and the clients alone. What a task has of them may depend on the workers, for the order in
which blocks are added does not: a worker adds those that it has, and the driver has less to take and to add.
"""

from __future__ import annotations

import math

LARGE_BYTES = 1 << 20  # of what clients are sent, and so about of what they send: below it a result costs little
TASKS = 4  # a worker, or more, so that workers end at about the same time


def sizes_of_blocks(clients: int, most: int) -> list[int]:
    """Cut clients into blocks of at most so many, as equal as can be. Several are even in number: two workers end together."""
    count = math.ceil(clients / most)
    count = min(clients, count + count % 2) if count > 1 else 1
    each, more = divmod(clients, count)
    return [each + 1] * more + [each] * (count - more)


def blocks_a_task(blocks: int, workers: int, size: int) -> int:
    """Return how many of so many blocks go as one task, a power of two, where messages have ``size`` bytes."""
    if size < LARGE_BYTES or workers < 2:
        return 1
    return 1 << max(0, (blocks // (TASKS * workers)).bit_length() - 1)
