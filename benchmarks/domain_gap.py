"""Gaps between domains, by training on each and testing on all: ``python -m benchmarks.domain_gap``.

``--dataset`` chooses the data. A small convolutional net (16 and 32 channels, 128 hidden units) takes the same number
of Adam steps on each training set. A training set is one domain or, in the last row, all but the one that is tested
on. No method adapts to another domain here: these figures are where adaptation starts.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.command import say
from fedfleet.datasets import registry
from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.datasets.files import data_dir
from fedfleet.simulator.population import decode

BATCH, RATE = 64, 1e-3


def trained(x: Tensor, y: Tensor, classes: int, steps: int, seed: int) -> nn.Module:
    """Return a net that has learnt from images uint8 (n, c, h, w) and labels (n,)."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(x.shape[1], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * (x.shape[2] // 4) * (x.shape[3] // 4), 128), nn.ReLU(), nn.Linear(128, classes)),
    )
    adam = torch.optim.Adam(net.parameters(), RATE)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,))
        adam.zero_grad()
        nn.functional.cross_entropy(net(decode(x[rows])), y[rows]).backward()
        adam.step()
    return net


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of the images that a net labels rightly."""
    found = torch.cat([net(decode(part)).argmax(1) for part in x.split(1000)])
    return float((found == y).double().mean())


def of(examples: Examples, domains: list[int]) -> tuple[Tensor, Tensor]:
    """Return the images and labels of some domains."""
    assert examples.domain is not None
    rows = torch.isin(examples.domain, torch.tensor(domains))
    return examples.x[rows], examples.y[rows]


def measure(data: Dataset, steps: int, seeds: int) -> dict[str, list[float]]:
    """Return, of each domain that is learnt from and of all others, the mean accuracy on every domain's test examples."""
    every, classes = range(len(data.domains)), data.train.classes
    tests = [of(data.test, [k]) for k in every]
    total = torch.zeros(len(every) + 1, len(every), dtype=torch.float64)
    for seed in range(seeds):
        for k, name in enumerate(data.domains):
            say(f"seed {seed}: {name}")
            net = trained(*of(data.train, [k]), classes, steps, seed)
            total[k] += torch.tensor([accuracy(net, *test) for test in tests], dtype=torch.float64)
            others = trained(*of(data.train, [j for j in every if j != k]), classes, steps, seed)
            total[-1, k] += accuracy(others, *tests[k])
    return dict(zip([*data.domains, "all others"], (total / seeds).tolist(), strict=True))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one data set."""
    data = registry.load(args.dataset, data_dir())
    return {"domains": list(data.domains), "accuracy": measure(data, args.steps, args.seeds), **command.machine()}


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = command.parser("benchmarks.domain_gap", __doc__)
    known = ["domains_digits", "fashion_mnist_shifts", "mnist_shifts", "digit_five", "mnistm", "mnistm_unpaired"]
    args.add_argument("--dataset", choices=known, default=known[0])
    args.add_argument("--steps", type=command.count, default=1000, help="of training (default 1000)")
    args.add_argument("--seeds", type=command.count, default=3, help="runs that are averaged (default 3)")
    args.add_argument("--json", action="store_true", help="print JSON")
    given = args.parse_args(argv)
    result = run(given)
    if given.json:
        print(json.dumps(result))
    else:
        rows = [[name, *(f"{100 * a:.1f}" for a in row)] for name, row in result["accuracy"].items()]
        command.show("accuracy in %: rows learnt from, columns tested on", ["", *result["domains"]], rows)


if __name__ == "__main__":
    main()
