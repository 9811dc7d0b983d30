"""Cost of adapters beside whole nets: ``python -m benchmarks.adapters``: a block of clients at once, or one at a time.

A round has 32 clients with two steps each. They train adapters of rank 8, or all weights, of an MLP and of a small
transformer. All ways take turns in this process with one thread. Memory is how much a process of its own grows over
two rounds, at its peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command, turns, world
from benchmarks.command import say
from benchmarks.memory_use import Peak, give_back, own_bytes
from benchmarks.peers.workload import Case
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.commands.rules import How
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks import from_module

CLIENTS, STEPS, BATCH, RANK, CLASSES = 32, 2, 2, 8, 10
WIDTH, LENGTH, WORDS, HEADS = 256, 32, 1000, 4
WARMUP = 1
WAYS = [(RANK, "serial"), (RANK, "batched"), (RANK, "factored"), (None, "serial"), (None, "batched")]


class Layer(nn.Module):
    """Attention and two linear layers, each after a LayerNorm and added to what came in."""

    def __init__(self, width: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, T, width) after the layer."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        weight = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.o((weight @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Classifies sequences of words."""

    def __init__(self, layers: int):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 50)
        self.layers, self.out = nn.Sequential(*(Layer(WIDTH) for _ in range(layers))), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes) of words (B, T)."""
        return self.out(self.layers(self.words(x) + self.places).mean(1))


def mlp() -> nn.Module:
    """Return a net of 1.9 million weights."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def transformer() -> nn.Module:
    """Return a net of 1.8 million weights: two layers, and the words' vectors."""
    return Transformer(2)


NETS = {"mlp": mlp, "transformer": transformer}


def built(net: str, rank: int | None) -> world.World:
    """Return a federation that learns a net, or adapters beside it."""
    case = Case(
        net, net, (LENGTH,) if net == "transformer" else (784,), clients=CLIENTS, cohort=CLIENTS, samples=STEPS * BATCH
    )
    case = Case(**{**vars(case), "batch": BATCH, "lr": 0.01, "warmup": WARMUP})
    task = from_module(NETS[net], adapters=None if rank is None else {"rank": rank})
    drawn, total = torch.Generator().manual_seed(0), CLIENTS * case.samples
    x = torch.rand(total, 784, generator=drawn)
    data = {"x": (x[:, :LENGTH] * WORDS).long() if net == "transformer" else x, "y": torch.arange(total) % CLASSES}
    places = torch.arange(0, total + 1, case.samples)
    clients = InMemoryPopulation(data, torch.arange(total), places, torch.zeros(CLIENTS, dtype=torch.int64))
    entry = ALGORITHMS["fedavg"]
    options = entry.options(**{"steps": STEPS, "batch_size": BATCH, "lr": case.lr})
    return world.World(case, task, entry.build(options, task, CohortOptions(size=CLIENTS)), clients)


def said(rank: int | None, inner: str) -> str:
    """Return how a way is called."""
    return f"{'all weights' if rank is None else f'rank {rank}'}, {inner}"


def grown(net: str, rank: int | None, inner: str) -> int:
    """Return by how many bytes this process grows over two rounds."""
    torch.set_num_threads(1)
    ready = built(net, rank)
    give_back()
    before = own_bytes() or 0
    with closing(LocalExecutor(1)) as executor, Peak(0.005) as peak:
        for _ in world.play(ready, executor, How(inner, CLIENTS), 2, capture=False):
            pass
    return (peak.bytes or 0) - before


def measure(net: str, number: int) -> dict[str, Any]:
    """Return milliseconds a round, memory, and floats that a client sends, of each way."""
    worlds = {rank: built(net, rank) for rank in (RANK, None)}
    with ExitStack() as stack:

        def play(rank: int | None, inner: str) -> Iterator[float]:
            executor = stack.enter_context(closing(LocalExecutor(1)))
            rounds = world.play(worlds[rank], executor, How(inner, CLIENTS), WARMUP + number, capture=False)
            return (r.seconds for r in rounds)

        ways = {said(*way): play(*way) for way in WAYS}
        found = turns.taken(ways, worlds[RANK].case, number, said(RANK, "batched"), ways)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        memory = {said(*way): pool.submit(grown, net, *way).result() for way in WAYS}
    floats = {said(rank, inner): T.count(worlds[rank].task.init(0)) for rank, inner in WAYS}
    return {**found, "grown_mb": {way: size / 1e6 for way, size in memory.items()}, "floats_up": floats}


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask: argparse.ArgumentParser = command.parser("benchmarks.adapters", __doc__)
    ask.add_argument("--net", choices=NETS, action="append", help="(default: each)")
    ask.add_argument("--turns", type=command.count, default=5, help="of each (default %(default)d)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    found = {}
    for net in args.net or NETS:
        say(f"{net}: {args.turns} turns")
        found[net] = measure(net, args.turns)
    if args.json:
        print(json.dumps({"machine": command.machine(), **found}))
        return
    for net, told in found.items():
        print(f"{net}, {CLIENTS} clients, one process, one thread")
        for way, ms in told["ms"].items():
            beside, memory, floats = told["over"][way]["median"], told["grown_mb"][way], told["floats_up"][way]
            print(f"{way:22} {ms:9.0f} ms a round, {beside:5.2f} times, {memory:7.0f} MB more, {floats:10,} floats up")


if __name__ == "__main__":
    main()
