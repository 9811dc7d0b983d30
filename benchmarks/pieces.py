"""Products of a block of logistic regression, in pieces whose inputs a cache holds: ``python -m benchmarks.pieces``.

Two steps of ten rows a client, as the engine does them: gather the inputs, one product with the shared weight, one of each client's
second inputs with its first ones, and the weighted sum of all outer products. All clients at once, then so many at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks import command, turns
from benchmarks.blocks import spread, told
from fedfleet.simulator.executors.worker import prepare

ROWS, INPUTS, CLASSES, EXAMPLES, RATE = 10, 784, 10, 60_000, 0.1
WHOLE = "all at once"


class Block:
    """Inputs of a block: examples (n, 784), rows (C, 20) of them, labels as vectors (C, 20, 10), weights (C,)."""

    def __init__(self, clients: int, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        self.data = torch.randn(EXAMPLES, INPUTS, generator=draw)
        self.rows = torch.randint(EXAMPLES, (clients, 2 * ROWS), generator=draw)
        labels = torch.randint(CLASSES, (clients, 2 * ROWS), generator=draw)
        self.labels = torch.nn.functional.one_hot(labels, CLASSES).float()
        self.weight = torch.rand(clients, generator=draw)
        self.model = 0.01 * torch.randn(CLASSES, INPUTS, generator=draw)

    def sum_of(self, clients: slice) -> tuple[Tensor, Tensor]:
        """Return d (C 20, 10) and inputs (C 20, 784) of some clients, whose weighted sum of updates is d^T inputs."""
        rows, labels = self.rows[clients], self.labels[clients]
        x = self.data.index_select(0, rows.flatten()).view(len(rows), 2 * ROWS, INPUTS)
        outputs = torch.matmul(x, self.model.mT)
        first = torch.softmax(outputs[:, :ROWS], -1) - labels[:, :ROWS]
        seen = torch.bmm(x[:, ROWS:], x[:, :ROWS].mT)
        second = torch.softmax(torch.baddbmm(outputs[:, ROWS:], seen, first, alpha=-RATE), -1) - labels[:, ROWS:]
        d = torch.cat([first, second], 1) * self.weight[clients, None, None]
        return d.flatten(0, 1), x.flatten(0, 1)

    def update(self, at_once: int) -> Tensor:
        """Return the weighted sum of updates (10, 784), from so many clients at a time."""
        total = torch.zeros(CLASSES, INPUTS)
        for first in range(0, len(self.rows), at_once):
            d, x = self.sum_of(slice(first, first + at_once))
            total = torch.addmm(total, d.mT, x)
        return total


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.pieces", __doc__)
    ask.add_argument("--clients", type=command.count, default=50, help="of the block (default %(default)d)")
    ask.add_argument("--turns", type=command.count, default=301, help="of each way (default %(default)d)")
    args = ask.parse_args(argv)
    prepare(1)  # as a worker is
    block = Block(args.clients)
    sizes = [n for n in (25, 17, 10, 5) if n < args.clients]
    ways: dict[str, Callable[[], object]] = {WHOLE: partial(block.update, args.clients)}
    ways |= {f"{n} at a time": partial(block.update, n) for n in sizes}
    times = turns.processor(ways, args.turns)
    rows = [[name, median(t[name] for t in times), told(spread([t[name] / t[WHOLE] for t in times]))] for name in ways]
    command.show(f"A block of {args.clients} clients, its products alone", ["clients", "ms", "over the first"], rows)


if __name__ == "__main__":
    main()
