"""Jobs that others have published times of, in shape: ``python -m benchmarks.published --json published.json``, on a CUDA device.

Nets, clients, cohorts, batches, epochs and rounds are theirs; examples are tensors of the right shapes without meaning, so that
nothing is downloaded, and nothing is evaluated. Where a budget ends before all rounds are done, the rest is reckoned from those
that were, and said. The arithmetic of a job, forward and backward, over its time is set beside what large products of the same
precision reach on the same device in the same run. ``--scale small`` has a few rounds of few clients, to try it out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import command, gpu, limit, world
from benchmarks.command import say
from benchmarks.peers.workload import cnn
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config import rules
from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.driver.probe import probe
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks.module import from_module

SEQUENCE, WORDS = 20, 10_000


class Job(NamedTuple):
    """A published job.

    Attributes:
        published: what others say of it, and where.
        must_s: seconds it must take here at most, on one H100; None for none.
        net: what makes the net.
        loss: of ``fedfleet.tasks.from_module``.
        clients, samples: how many there are, with how many examples each, on average.
        alpha: of the Dirichlet law of the clients' sizes; None where all have as many.
        rounds: how many, or versions of an asynchronous server.
        cohort: clients a round, or at work at any time.
        algorithm: its name and options.

    """

    published: str
    must_s: float | None
    net: Callable[[], nn.Module]
    loss: str
    clients: int
    samples: int
    alpha: float | None
    rounds: int
    cohort: int
    algorithm: str
    options: Mapping[str, Any]


def moderate_cnn() -> nn.Module:
    """Return NVFlare's ModerateCNN, for images 3x32x32 (``examples/advanced/cifar10``), without its dropout."""
    conv = lambda i, o: (nn.Conv2d(i, o, 3, padding=1), nn.ReLU())  # noqa: E731
    return nn.Sequential(
        *(*conv(3, 32), *conv(32, 64), nn.MaxPool2d(2)),
        *(*conv(64, 128), *conv(128, 128), nn.MaxPool2d(2)),
        *(*conv(128, 256), *conv(256, 256), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


class Words(nn.Module):
    """A transformer that foretells words: 96 wide, 8 heads, 3 layers, 1,536 inner, as in pfl-research's StackOverflow benchmark."""

    def __init__(self, wide: int = 96, heads: int = 8, layers: int = 3, inner: int = 1536):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, wide), nn.Parameter(0.02 * torch.randn(SEQUENCE, wide))
        one = lambda: nn.TransformerEncoderLayer(wide, heads, inner, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.layers = nn.ModuleList(one() for _ in range(layers))
        self.out = nn.Linear(wide, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, T, V) of words (B, T) int64."""
        seen = self.words(x) + self.places
        later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            seen = layer(seen, src_mask=later)
        return self.out(seen)


JOBS = {
    "pfl_cifar10": Job(
        "pfl-research, benchmarks/image_classification: CIFAR10 IID, 1,000 clients of 50 images; minutes not read",
        60.0,
        cnn,
        "cross_entropy",
        *(1000, 50, None, 1500, 50),
        "fedavg",
        {"epochs": 1, "batch_size": 10, "lr": 0.1},
    ),
    "nvflare_cifar10": Job(
        "NVFlare, examples/advanced/cifar10/pt/cifar10-real-world: 9.1 min, two jobs at once on one H100",
        180.0,
        moderate_cnn,
        "cross_entropy",
        *(8, 6250, 1.0, 50, 8),
        "fedavg",
        {"epochs": 4, "batch_size": 64, "lr": 0.01, "client_optimizer": {"name": "sgd", "momentum": 0.9}},
    ),
    "nvflare_edge": Job(
        "NVFlare, examples/advanced/edge: 40,000 devices, 200 at work, FedBuff of 20; no time given",
        10.0,
        cnn,
        "cross_entropy",
        *(40_000, 100, None, 200, 200),
        "fedbuff",
        {"epochs": 4, "batch_size": 10, "lr": 0.1, "buffer": 20, "concurrency": 200},
    ),
    "pfl_stackoverflow": Job(
        "pfl-research, benchmarks/lm: a cohort of 400, about 4 s a round, later 2 (GPUs not named)",
        800.0,  # 0.4 s a round
        Words,
        "token_cross_entropy",
        *(4000, 64, None, 2000, 400),
        "fedavg",
        {"epochs": 1, "batch_size": 16, "lr": 0.3},
    ),
}
SMALL = {"clients": 4, "samples": 4, "rounds": 2, "cohort": 2}
SMALL_OPTIONS = {"batch_size": 2, "epochs": 1}


def reduced(job: Job) -> Job:
    """Return a job of the same kind that takes seconds."""
    less = {"buffer": 2, "concurrency": 2} if "buffer" in job.options else {}
    return job._replace(**SMALL, options={**job.options, **SMALL_OPTIONS, **less})


def examples(job: Job, count: int) -> dict[str, Tensor]:
    """Return so many examples, which mean nothing."""
    draw = torch.Generator().manual_seed(0)
    if job.loss == "token_cross_entropy":
        found = torch.randint(WORDS, (count, SEQUENCE + 1), generator=draw)
        return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}
    x = torch.randn(count, 3, 32, 32, generator=draw)
    return {"x": x, "y": torch.randint(10, (count,), generator=draw)}


def population(job: Job) -> InMemoryPopulation:
    """Return the clients. Where there are a million examples, clients share those of 1,000."""
    owners = min(job.clients, 1000)
    sizes = torch.full((owners,), job.samples)
    if job.alpha is not None:
        torch.manual_seed(0)
        share = torch.distributions.Dirichlet(torch.full((owners,), job.alpha)).sample()
        sizes = (share * owners * job.samples).long().clamp(min=1)
    total = int(sizes.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    domain = torch.zeros(owners, dtype=torch.int64)
    found = InMemoryPopulation(examples(job, total), torch.arange(total), offsets, domain)
    return found if job.clients == owners else gpu.enlarged(found, job.clients)


def flop(job: Job) -> float:
    """Return the floating-point operations of an example, forward and backward."""
    return limit.flop(job.net(), examples(job, 2)["x"])


def measure(name: str, job: Job, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of a job, and what they are set beside."""
    task = from_module(job.net, loss=job.loss)
    entry, people = ALGORITHMS[job.algorithm], population(job)
    algorithm = entry.build(entry.options(**job.options), task, CohortOptions(invite=job.cohort))
    z = task.init(0)
    problem = Problem(people.size, float(job.samples), people.num_examples)
    learned = probe(algorithm, z, problem, Setup.of(algorithm, task, people, "factored"))
    how = world.How(rules.inner(z, learned, args.device), rules.block_size(job.cohort, z, learned, args.device))
    setup = Setup.of(algorithm, task, people, how.inner, device=args.device)
    seconds, trained, began = list[float](), 0, time.perf_counter()
    with closing(LocalExecutor(args.threads)) as executor, gpu.precision(mode, args.device):
        executor.start(setup)
        conditions = Conditions(seed=0, block_size=how.block_size)
        records = simulate(algorithm, z, problem, conditions, executor, job.rounds)
        while len(seconds) < job.rounds and (not seconds or time.perf_counter() - began < args.budget):
            limit.synchronise(args.device)
            started = time.perf_counter()
            (record,) = islice(records, 1)
            limit.synchronise(args.device)
            seconds.append(time.perf_counter() - started)
            trained += sum(p.counts["heard"] + p.counts["merged_stale"] for p in record.phases)
        peak = limit.reached(args.device, limit.WIDE[args.device])
    settled = seconds[len(seconds) // 3 :]
    whole = sum(seconds) + (job.rounds - len(seconds)) * median(settled)
    an_update = flop(job) * job.samples * (job.options.get("epochs") or 1)
    return {
        "job": name,
        "precision": mode,
        "inner": how.inner,
        "block_size": how.block_size,
        "rounds": len(seconds),
        "of": job.rounds,
        "seconds": whole,
        "must_s": job.must_s,
        "client_updates_per_s": trained / sum(seconds),
        "flop": an_update * trained * job.rounds / len(seconds),
        "share": an_update * trained / sum(seconds) / peak,
        "published": job.published,
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.published", __doc__)
    ask.add_argument("--job", action="append", choices=JOBS, help="one, or several by repeating; default: all")
    ask.add_argument("--precision", action="append", choices=gpu.PRECISIONS, help="default: float32 and tf32")
    ask.add_argument("--budget", type=command.seconds, default=240, help="seconds a job may take (default 240)")
    ask.add_argument("--scale", choices=["full", "small"], default="full", help="small: to try it out")
    ask.add_argument("--threads", type=command.count, default=1, help="torch threads (default 1)")
    ask.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try it out")
    ask.add_argument("--json", type=command.writable, metavar="FILE", help="write everything measured, after every job")
    args = ask.parse_args(argv)
    gpu.leave_without(args.device)
    found = []
    for name in args.job or JOBS:
        job = reduced(JOBS[name]) if args.scale == "small" else JOBS[name]
        for mode in args.precision or (("float32",) if args.device == "cpu" else ("float32", "tf32")):
            say(f"{name}, {mode}: {job.rounds:,} rounds")
            found.append(measure(name, job, mode, args))
            if args.json:
                command.write(args.json, {"machine": command.machine(), "jobs": found})
    columns = [
        "job",
        "precision",
        "inner",
        "rounds",
        "seconds",
        "must",
        "client updates/s",
        "share of products",
        "published",
    ]
    rows = [
        [
            *(
                r["job"],
                r["precision"],
                r["inner"],
                f"{r['rounds']:,} of {r['of']:,}",
                r["seconds"],
                r["must_s"] or "-",
            ),
            *(r["client_updates_per_s"], f"{r['share']:.1%}", r["published"]),
        ]
        for r in found
    ]
    command.show("Published jobs, in shape", columns, rows)


if __name__ == "__main__":
    main()
