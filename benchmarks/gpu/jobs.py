"""Jobs that others have published times of, in shape.

Nets, clients, cohorts, batches, epochs and rounds are theirs; examples are tensors of the right shapes without meaning, so that
nothing is downloaded, and nothing is evaluated, or changed on its way into a batch. Where a budget ends before all rounds are
done, the rest is reckoned from those that were, and said. The arithmetic of a job, forward and backward, over its time is set
beside what large products in the same mode reach on the same device in the same run. Where pfl-research can be installed,
its own job runs on the device, too.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import command, limit, world
from benchmarks.command import say
from benchmarks.gpu.device import MODES, emptied, why
from benchmarks.peers import __main__ as peers
from benchmarks.peers.environments import Failure
from benchmarks.peers.workload import Case, cnn
from fedfleet.algorithms.options import CohortOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config import rules
from fedfleet.simulator.algorithm import Algorithm, Problem, Task
from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.block.block import Setup, phases_of
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.driver.probe import probe
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.tasks.module import from_module

SEQUENCE, WORDS = 20, 10_000
PFL_ROUNDS = 10
FEW_STEPS = 10  # local steps from which a long round is reckoned


class Job(NamedTuple):
    """A published job.

    Attributes:
        published: what others say of it, and where.
        must_s, aim_s: seconds it must take here at most, and is to take, on one H100; None for no aim.
        net: what makes the net.
        loss: of ``fedfleet.tasks.from_module``.
        clients, samples: how many there are, with how many examples each, on average.
        alpha: of the Dirichlet law of the clients' sizes; None where all have as many.
        rounds: how many, or versions of an asynchronous server.
        cohort: clients a round, or at work at any time.
        algorithm: its name and options.

    """

    published: str
    must_s: float
    aim_s: float | None
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
    """Return NVFlare's ModerateCNN, for images 3x32x32 (``examples/advanced/cifar10``)."""
    conv = lambda i, o: (nn.Conv2d(i, o, 3, padding=1), nn.ReLU())  # noqa: E731
    return nn.Sequential(
        *(*conv(3, 32), *conv(32, 64), nn.MaxPool2d(2)),
        *(*conv(64, 128), *conv(128, 128), nn.MaxPool2d(2), nn.Dropout2d(0.05)),
        *(*conv(128, 256), *conv(256, 256), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()),
        *(nn.Dropout(0.1), nn.Linear(512, 10)),
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
        30.0,
        cnn,
        "cross_entropy",
        *(1000, 50, None, 1500, 50),
        "fedavg",
        {"epochs": 1, "batch_size": 10, "lr": 0.1},
    ),
    "nvflare_cifar10": Job(
        "NVFlare, examples/advanced/cifar10/pt/cifar10-real-world: 9.1 min, two jobs at once on one H100",
        180.0,
        60.0,
        moderate_cnn,
        "cross_entropy",
        *(8, 6250, 1.0, 50, 8),
        "fedavg",
        {"epochs": 4, "batch_size": 64, "lr": 0.01, "client_optimizer": {"name": "sgd", "momentum": 0.9}},
    ),
    "nvflare_edge": Job(
        "NVFlare, examples/advanced/edge: 40,000 devices, 200 at work, FedBuff of 20; no time given",
        10.0,
        None,
        cnn,
        "cross_entropy",
        *(40_000, 100, None, 200, 200),
        "fedbuff",
        {"epochs": 4, "batch_size": 10, "lr": 0.1, "buffer": 20, "concurrency": 200},
    ),
    "pfl_stackoverflow": Job(
        "pfl-research, benchmarks/lm: a cohort of 400, about 4 s a round, later 2 (GPUs not named)",
        800.0,  # 0.4 s a round
        None,
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
    return found if job.clients == owners else world.enlarged(found, job.clients)


def built(job: Job, task: Task, **other: Any) -> Algorithm:
    """Return a job's algorithm, with ``other`` options."""
    entry = ALGORITHMS[job.algorithm]
    return entry.build(entry.options(**{**job.options, **other}), task, CohortOptions(size=job.cohort))


def flop(job: Job) -> float:
    """Return the floating-point operations of an example, forward and backward."""
    return limit.flop(job.net(), examples(job, 2)["x"])


def measure(job: Job, mode: str, peak: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of a job; ``peak`` is what large products reach, in floating-point operations a second.

    A job of which one round would take longer than the budget is reckoned from a few local steps.
    """
    task, people = from_module(job.net, loss=job.loss), population(job)
    algorithm, z = built(job, task), task.init(0)
    problem = Problem(people.size, float(job.samples), people.num_examples)
    learned = probe(algorithm, z, problem, Setup.of(algorithm, task, people, "factored"))
    how = world.How(rules.inner(z, learned, args.device), rules.block_size(job.cohort, z, learned, args.device))
    captures = Captures(after=None) if args.no_capture else Captures()
    setup = Setup.of(algorithm, task, people, how.inner, device=args.device, gpu=MODES[mode], captures=captures)
    conditions = Conditions(seed=0, block_size=how.block_size)
    an_update = flop(job) * job.samples * (job.options.get("epochs") or 1)

    def play(algorithm: Algorithm, rounds: int, budget: float) -> tuple[list[float], int]:
        """Return the seconds of each round until the budget is spent, and how many clients were trained."""
        seconds, trained, began = list[float](), 0, time.perf_counter()
        with closing(LocalExecutor(args.threads)) as executor, fresh_settings():
            executor.start(replace(setup, phases=phases_of(algorithm)))
            records = simulate(algorithm, z, problem, conditions, executor, rounds)
            while len(seconds) < rounds and (not seconds or time.perf_counter() - began < budget):
                limit.synchronise(args.device)
                started = time.perf_counter()
                (record,) = islice(records, 1)
                limit.synchronise(args.device)
                seconds.append(time.perf_counter() - started)
                trained += sum(p.counts["completed"] + p.counts["merged_stale"] for p in record.phases)
        return seconds, trained

    steps = job.options["epochs"] * -(-job.samples // job.options["batch_size"])
    if steps > FEW_STEPS:
        (_, short), _ = play(built(job, task, epochs=None, steps=FEW_STEPS), 2, math.inf)
        if (a_round := short * steps / FEW_STEPS) > args.budget:
            rate = job.cohort / a_round
            return {
                **{"inner": how.inner, "block_size": how.block_size, "rounds": 0, "seconds": a_round * job.rounds},
                **{"client_updates_per_s": rate, "flop": an_update * job.cohort * job.rounds},
                **{"share": rate * an_update / peak, "note": f"reckoned from {FEW_STEPS} of a round's {steps:,} steps"},
            }
    seconds, trained = play(algorithm, job.rounds, args.budget)
    settled = seconds[len(seconds) // 3 :]
    return {
        "note": "",
        "inner": how.inner,
        "block_size": how.block_size,
        "rounds": len(seconds),
        "seconds": sum(seconds) + (job.rounds - len(seconds)) * median(settled),
        "client_updates_per_s": trained / sum(seconds),
        "flop": an_update * trained * job.rounds / len(seconds),
        "share": an_update * trained / sum(seconds) / peak,
    }


def measured(args: argparse.Namespace, limits: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Measure all jobs in each mode; "note" says why one has no time.

    ``limits`` has what large products reach by mode.
    """
    for name, job in JOBS.items():
        job = reduced(job) if args.scale == "small" else job
        for mode in args.mode:
            about = {"job": name, "mode": mode, "of": job.rounds, "must_s": job.must_s, "aim_s": job.aim_s}
            about |= {"published": job.published}
            say(f"{name}, {mode}: {job.rounds:,} rounds")
            emptied(args.device)
            try:
                yield about | measure(job, mode, limits[mode], args)
            except (RuntimeError, FedfleetError) as e:
                yield about | {"note": why(e)}


def pfl(args: argparse.Namespace) -> dict[str, Any]:
    """Let pfl-research do its job on the device, one process a GPU; "note" says why there is no rate."""
    job = reduced(JOBS["pfl_cifar10"]) if args.scale == "small" else JOBS["pfl_cifar10"]
    shape = (3, 32, 32)
    case = Case("pfl_cifar10", "cnn", shape, job.clients, job.cohort, job.samples, rounds=PFL_ROUNDS, warmup=PFL_ROUNDS)
    processes = torch.cuda.device_count() if args.device == "cuda" else peers.WORKERS
    say(f"pfl_cifar10 by pfl-research, processes: {processes}")
    try:
        return {"job": "pfl_cifar10", **peers.pfl(case, args, processes), "note": ""}
    except Failure as e:
        return {"job": "pfl_cifar10", "note": str(e)}


def show(found: list[dict[str, Any]], peer: dict[str, Any] | None) -> None:
    """Print the table, and how many times as fast as the peer its job is here."""
    columns = [
        "job",
        "mode",
        "inner",
        "rounds",
        "seconds",
        "must",
        "aim",
        "client updates/s",
        "share",
        "published",
    ]
    rows = [
        [
            *(r["job"], r["mode"], r.get("inner", "-"), f"{r.get('rounds', 0):,} of {r['of']:,}"),
            *(r.get("seconds", "-"), r["must_s"], r["aim_s"] or "-", r.get("client_updates_per_s", "-")),
            *(f"{r['share']:.1%}" if "share" in r else "-", r["note"] or r["published"]),
        ]
        for r in found
    ]
    command.show("Published jobs, in shape", columns, rows)
    if peer is None:
        return
    theirs = peer.get("client_updates_per_s")
    if theirs is None:
        print(f"pfl-research did not run: {peer['note']}")
        return
    for r in found:
        if r["job"] == peer["job"] and "client_updates_per_s" in r:
            times = r["client_updates_per_s"] / theirs
            print(f"{r['job']}, {r['mode']}: {times:.1f} times {peer['version']} on this device (must be 10)")
