"""Distance of FedOMG's search for the mixture from the exact one: ``python -m benchmarks.matching``.

Updates are standard normal in a thousand coordinates, or those of clients that train an MLP on scikit-learn's digits. For
each number of clients the result has two things, of the paper's 20 steps. One is how far the objective of Eq. (15) is above
its least value. The other is the gain of the worst client, min_u <step, Delta_u>, as a share of the largest possible.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import fedfleet
from benchmarks.command import say
from fedfleet.algorithms import matching, omg

CLIENTS = (5, 10, 30, 100)
FLOATS, DRAWS, ROUNDS = 1000, 10, 10
KAPPA = 0.5  # the paper's


class Problem(NamedTuple):
    """Inner products (S, S) float64 of updates, and their weights (S,) float64."""

    gram: Tensor
    weights: Tensor


def drawn(clients: int) -> Iterator[Problem]:
    """Yield problems of normal updates with unequal weights."""
    for seed in range(DRAWS):
        g = torch.Generator().manual_seed(seed)
        updates = torch.randn(clients, FLOATS, dtype=torch.float64, generator=g)
        weights = torch.rand(clients, dtype=torch.float64, generator=g).square() + 0.01
        yield Problem(updates @ updates.T, weights / weights.sum())


def trained(clients: int) -> list[Problem]:
    """Return the problems of the first rounds of FedAvg's clients, all of whom are asked."""
    seen: list[Problem] = []
    search = matching.mixture

    def noted(gram: Tensor, weights: Tensor, *given: Any) -> Tensor:
        seen.append(Problem(gram, weights))
        return search(gram, weights, *given)

    of = {"name": "fedavg", "epochs": 1, "batch_size": 16, "lr": 0.05}
    with patch.object(omg, "mixture", noted), tempfile.TemporaryDirectory() as folder:
        fedfleet.run(
            {
                "rounds": ROUNDS,
                "population": {"clients": clients, "partition": {"kind": "dirichlet", "alpha": 0.5, "min_size": 2}},
                "task": {"name": "classification", "model": "mlp", "hidden": [64, 64]},
                "algorithm": {"name": "omg", "of": of, "kappa": KAPPA, "rescale": "one_plus_kappa2"},
                "cohort": {"size": clients},
                "executor": {"kind": "local", "inner": "batched", "block_size": 10},
                "evaluation": {"every": ROUNDS},
                "checkpoint": {"every_s": None, "best": None},
            },
            out=folder,
        )
    return seen


def compared(problem: Problem) -> tuple[float, float]:
    """Return how far the paper's search ends above the optimum, relative to that, and the share of the possible gain."""
    gram, weights = problem
    gammas = matching.mixture(gram, weights, KAPPA), matching.exact_mixture(gram, weights, KAPPA)
    mine, best = (float(matching.objective(gram, weights, gamma, KAPPA)) for gamma in gammas)
    gain, most = (float((gram @ matching.coefficients(gram, weights, gamma, KAPPA)).min()) for gamma in gammas)
    return (mine - best) / abs(best), gain / most


def main() -> None:
    """Print a line of JSON a kind of updates and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--updates", choices=("drawn", "trained"), nargs="+", default=("drawn", "trained"))
    asked = parser.parse_args()
    for kind in asked.updates:
        for clients in asked.clients:
            say(f"{clients} clients, {kind}")
            found = [compared(problem) for problem in (drawn if kind == "drawn" else trained)(clients)]
            above, share = (sorted(column) for column in zip(*found, strict=True))
            result = {
                "above_median": median(above),
                "above_most": above[-1],
                "gain_least": share[0],
                "gain_median": median(share),
                "gain_most": share[-1],
            }
            print(json.dumps({"updates": kind, "clients": clients} | {k: round(v, 3) for k, v in result.items()}))


if __name__ == "__main__":
    main()
