"""Small digits, and the same turned or brightened without labels, at two clients: ``python tests/algorithms/shifted_digits.py``.

Of scikit-learn's 1,797 digits 700 are labelled, 700 others shifted and unlabelled, the last 397 shifted and tested on. Client
1 holds the first share p of the sources and the first 1 - p of the targets, client 2 the others: at p = 1 one has all labels.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import World, build, records
from sklearn.datasets import load_digits
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.errors import ClientError
from fedfleet.simulator.population import InMemoryPopulation
from fedfleet.simulator.work import Batch
from fedfleet.tasks.adaptation import AdaptationOptions, DomainAdaptation
from fedfleet.tasks.options import DataShape

HELD = 700
ROUNDS, LAST, EVERY = 200, 5, 10
LOCAL = {"steps": 20, "batch_size": 64, "lr": 0.05}


def turned(x: Tensor) -> Tensor:
    """Rotate images by 30 degrees, bilinearly."""
    turn = torch.deg2rad(torch.tensor(30.0))
    affine = torch.stack([turn.cos(), -turn.sin(), turn * 0, turn.sin(), turn.cos(), turn * 0]).view(1, 2, 3)
    grid = torch.nn.functional.affine_grid(affine.expand(len(x), -1, -1), list(x.shape), align_corners=True)
    return torch.nn.functional.grid_sample(x, grid, align_corners=True)


def brightened(x: Tensor) -> Tensor:
    return (x + 0.6).clamp(0, 1.6)


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {"rot30": turned, "bright": brightened}


class Trial(NamedTuple):
    """Clients, and what their model is tested on."""

    world: World
    x: Tensor
    y: Tensor

    def accuracy(self, name: str, rounds: int, seed: int, **options: Any) -> float:
        """The mean test accuracy of the last evaluations of a run; NaN where it diverges."""
        size = self.world.population.size
        algorithm = build(name, self.world.task, CohortOptions(size=size), **LOCAL, **options)
        predict, view, found = self.world.task.functions["predict"], algorithm.views["global"].params, []
        run = records(algorithm, self.world, rounds, inner="batched", seed=seed, captures=Captures(after=None))
        try:
            for t, r in enumerate(run, 1):
                if t % EVERY == 0 and t > rounds - LAST * EVERY:
                    logits = predict(view(r.state), Batch({"x": self.x}, torch.ones(len(self.x))))["logits"]
                    found.append(float((logits.argmax(1) == self.y).double().mean()))
        except ClientError:
            return float("nan")
        return sum(found) / len(found)


def trial(shift: str, p: float | None, seed: int, loss: str = "dann") -> Trial:
    """Two clients with so much of the sources at the first, one that holds everything where that is None."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    order = rng.permutation(rng.fold(rng.key(0), "shifted digits", seed), len(x))
    source, target, test = order[:HELD], order[HELD : 2 * HELD], order[2 * HELD :]
    shifted = SHIFTS[shift]
    data = {"x": torch.cat([x[source], shifted(x[target])]), "y": torch.cat([y[source], y[target]])}
    s, t = torch.arange(HELD), torch.arange(HELD, 2 * HELD)
    cut = round((1 if p is None else p) * HELD)
    clients = [torch.cat([s[:cut], t[: HELD - cut]]), torch.cat([s[cut:], t[HELD - cut :]])]
    if p is None:
        clients = [s if loss == "none" else torch.cat([s, t])]
    sizes = torch.tensor([0, *map(len, clients)])
    population = InMemoryPopulation(data, torch.cat(clients), sizes.cumsum(0), torch.zeros(len(clients)).long())
    task = DomainAdaptation(AdaptationOptions(loss=loss), DataShape((1, 8, 8), 10))
    world = World(task, population.withholding(torch.arange(2 * HELD) >= HELD) if task.unlabelled else population)
    return Trial(world, shifted(x[test]), y[test])


def fedmm(mu: float, eta3: float) -> dict[str, Any]:
    return {"mu1": mu, "mu2": mu, "eta3": {"kind": "constant", "value": eta3}}


ROWS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "source only": ("fedavg", None, {}),
    "central SGDA": ("fedavg_sgda", None, {}),
    "FedAvgSGDA p=0.5": ("fedavg_sgda", 0.5, {}),
    "FedAvgSGDA p=1": ("fedavg_sgda", 1.0, {}),
    "FedProxSGDA p=1, mu=1": ("fedprox_sgda", 1.0, {"mu1": 1.0, "mu2": 1.0}),
    "FedMM p=1, mu=0.5, eta3=0.3": ("fedmm", 1.0, fedmm(0.5, 0.3)),
    "FedMM p=1, mu=1, eta3=1": ("fedmm", 1.0, fedmm(1.0, 1.0)),
    "FedMM p=1, mu=0.5, eta3=1": ("fedmm", 1.0, fedmm(0.5, 1.0)),
}


def accuracies(row: str, shift: str, rounds: int = ROUNDS) -> list[float]:
    """Of seeds 0, 1, 2."""
    name, p, options = ROWS[row]
    loss = "none" if name == "fedavg" else "dann"
    return [trial(shift, p, seed, loss).accuracy(name, rounds, seed, **options) for seed in range(3)]


def main() -> None:
    """Print the table, and hold what it is to show of turned digits, where the first shift asked for is that."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shift", nargs="*", default=list(SHIFTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    shifts, turned_digits = given.shift, {}
    print(f"| | {' | '.join(shifts)} |\n|---|{'---|' * len(shifts)}")
    for row in ROWS:
        start = time.monotonic()
        found = [accuracies(row, shift, given.rounds) for shift in shifts]
        turned_digits[row] = sum(found[0]) / 3
        cells = [" ".join("–" if math.isnan(v) else f"{v:.2f}" for v in each) for each in found]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)
        print(f"{row}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if shifts[0] == "rot30" and given.rounds == ROUNDS:
        apart = turned_digits["FedAvgSGDA p=1"]
        assert turned_digits["FedAvgSGDA p=0.5"] - apart > 0.05
        assert turned_digits["FedMM p=1, mu=0.5, eta3=0.3"] - apart > 0.03


if __name__ == "__main__":
    main()
