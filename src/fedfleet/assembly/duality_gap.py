"""The duality gap of an agnostic model, where the losses are convex: how far from the best it can be.

Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019, Theorem 2, bounds

    max over lambda of L(w^A, lambda) - min over w of L(w, lambda^A)

which shrinks like 1 / sqrt(T). The minimum is sought by L-BFGS on all examples, in float64; as far as that stops short of it,
the gap is larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Saddle, Task
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.population import Population
from fedfleet.simulator.work import Batch

ITERATIONS = 500


class DomainLosses:
    """The training losses of all domains at a point, from every client's examples."""

    def __init__(self, task: Task, population: Population):
        everybody = torch.arange(population.size)
        result = population.local_data(everybody)
        real = torch.arange(result.rows.shape[1]) < result.counts[:, None]
        rows = result.rows[real]
        self._of = result.domain.repeat_interleave(result.counts)
        self._data = {k: _precise(v[rows]) for k, v in result.data.items()}
        self._examples = self._of.bincount().double()
        self._each = task.functions["per_example"]

    def __call__(self, z: Tree) -> Tensor:
        """Return the mean loss of each domain (p,), float64."""
        each = self._each(z, Batch(self._data, torch.ones(len(self._of), dtype=torch.float64)))["loss"]
        return torch.zeros_like(self._examples).index_add(0, self._of, each) / self._examples

    def least(self, saddle: Saddle) -> float:
        """Return the least value over models under the mixture of a saddle, sought from its model on."""
        leaves = [leaf.double().clone().requires_grad_() for leaf in T.leaves(saddle.z)]
        search = torch.optim.LBFGS(
            leaves, max_iter=ITERATIONS, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
        )

        def value() -> Tensor:
            z = T.unflatten(saddle.z, leaves)
            return saddle.value(saddle.mixture, self(z)) + saddle.penalty(z)

        def closure() -> Tensor:
            search.zero_grad()
            result = value()
            result.backward()
            return result.detach()

        search.step(closure)
        with torch.no_grad():
            return float(value())

    def gap(self, saddle: Saddle) -> float:
        """Return the duality gap of a model and a mixture."""
        z = T.map(Tensor.double, saddle.z)
        with torch.no_grad():
            most = saddle.worst(self(z)) + float(saddle.penalty(z))
        return most - self.least(saddle)


def _precise(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
