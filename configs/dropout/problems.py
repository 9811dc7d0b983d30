"""Problems whose solutions are known, so that the error that dropout makes can be measured.

A convex-concave quadratic game by two labels and AUC maximisation on digits with a linear score, both solved by a linear system;
softmax regression on digits and on Fashion-MNIST, solved by L-BFGS. The small tasks report `distance`, |z - z*| / |z*|, and
`bias`, the projection of z - z* on the line to the solution that a mean over those heard would find: 1 if the method ends there,
0 if it has no bias. Of Fashion-MNIST, whose solution takes half a minute, `python -m benchmarks.recovery` measures both later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedfleet
from fedfleet.datasets.files import data_dir as usual_data_dir
from fedfleet.datasets.mnist import load_fashion_mnist
from fedfleet.datasets.partition_skews import inner_dirichlet
from fedfleet.simulator.author import Batch, Objective, rng
from fedfleet.tasks.auc import auc_loss

CLIENTS, PER_CLIENT, TEST, CLASSES, REGIONS = 40, 35, 397, 10, 5
FASHION_CLIENTS, FASHION_EACH, PIXELS = 100, 200, 784
LABELS = ((1.0, 1.0, 1.0, 2.0, -1.0), (3.0, -0.5, 2.0, -4.0, 3.0))
"""Coefficients a, b, c, d, e of the game that clients of each label play."""


def weights_of_mean(chances: Sequence[float]) -> np.ndarray:
    """Return the expected weight (N,) of each client in a mean over those heard.

    All N clients are invited, each is heard with its own chance, and a round that nobody answers is tried again:
    q_i = p_i int_0^1 prod_{j != i} (1 - p_j + p_j u) du / (1 - prod_j (1 - p_j)).
    """
    p = np.asarray(chances, dtype=np.float64)
    q = np.empty_like(p)
    for i in range(len(p)):
        others = np.ones(1)
        for chance in np.delete(p, i):
            others = np.convolve(others, [1 - chance, chance])
        q[i] = p[i] * float((others / np.arange(1, len(others) + 1)).sum())
    return q / (1 - np.prod(1 - p))


@dataclass(frozen=True)
class ByLabel:
    """Clients are online each phase with the chance of the label that they hold; client i of N holds label i * L // N.

    `chances` has one number for each of L labels.
    """

    key: Tensor
    population: Any
    chances: tuple[float, ...]
    varies: ClassVar[bool] = False

    def long_run(self, clients: Tensor) -> Tensor:
        """Return the chances (S,)."""
        label = clients * len(self.chances) // self.population.size
        return torch.tensor(self.chances, dtype=torch.float64)[label]

    def chance(self, clients: Tensor, seconds: Tensor, lasting: Tensor) -> Tensor:
        """Return the chances (S,), whatever the moment: a phase has one draw."""
        return self.long_run(clients)

    def online(self, key: Tensor, clients: Tensor, seconds: Tensor) -> Tensor:
        """Return independent draws, one a client."""
        return rng.uniform(rng.fold(key, "online", clients), ()) < self.long_run(clients)


class Solved:
    """A game over z = (x, y), or a loss of x, of which the solution is known for any weights of the clients."""

    parts: tuple[str, ...] = ("x", "y")

    def __init__(self, solve: Callable[[np.ndarray], np.ndarray], clients: int, chances: Sequence[float] | None):
        """`chances` has a number for each label, dealt to clients as by ``ByLabel``; without them `bias` is not told."""
        self.solve, self._clients, self._chances = solve, clients, chances
        sign = {"x": 1, "y": -1}
        self.objectives = {"train": Objective(loss=self._loss, sign={part: sign[part] for part in self.parts})}
        self.functions: Mapping[str, Any] = {
            "predict": self.predict,
            "per_example": lambda z, batch: {"loss": self.each(z, batch)},
        }

    @cached_property
    def saddle(self) -> np.ndarray:
        """The solution where all clients count alike."""
        return self.solve(np.full(self._clients, 1 / self._clients))

    @cached_property
    def biased(self) -> np.ndarray | None:
        """The solution of the mean over those heard; None where the chances are not told."""
        if self._chances is None:
            return None
        label = np.arange(self._clients) * len(self._chances) // self._clients
        return self.solve(weights_of_mean(np.array(self._chances)[label].tolist()))

    def _loss(self, z: Any, batch: Any, ctx: Any, key: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.mean(self.each(z, batch)), {}

    def model_metrics(self, z: Any) -> dict[str, float]:
        """Return the relative distance to the saddle, and the share of the predicted bias."""
        flat = [leaf.double().flatten() for part in self.parts for _, leaf in sorted(z[part].items())]
        off = torch.cat(flat).numpy() - self.saddle
        found = {"distance": float(np.linalg.norm(off) / np.linalg.norm(self.saddle))}
        if self.biased is not None:
            wrong = self.biased - self.saddle
            length = float(wrong @ wrong)
            found["bias"] = float(off @ wrong / length) if length > 1e-20 else 0.0
        return found


class QuadraticGame(Solved):
    """f_i = a x^2 / 2 + b x y - c y^2 / 2 + d x + e y; an example is (a, b, c, d, e).

    Clients of the first half have the first label, the others the second: see ``games``.
    """

    def __init__(self, clients: int = 4, chances: tuple[float, ...] | None = None):
        super().__init__(self._solve, clients, chances)

    def _solve(self, weights: np.ndarray) -> np.ndarray:
        label = np.arange(len(weights)) * len(LABELS) // len(weights)
        a, b, c, d, e = weights @ np.array(LABELS)[label]
        return np.linalg.solve([[a, b], [-b, c]], [-d, e])

    def init(self, seed: int) -> dict[str, dict[str, Tensor]]:
        """Return (0, 0)."""
        return {"x": {"x": torch.zeros(())}, "y": {"y": torch.zeros(())}}

    def each(self, z: Any, batch: Any) -> Tensor:
        """Return the value of each example's game (B,)."""
        a, b, c, d, e = batch.x.unbind(-1)
        x, y = z["x"]["x"], z["y"]["y"]
        return a * x**2 / 2 + b * x * y - c * y**2 / 2 + d * x + e * y

    def predict(self, z: Any, batch: Any) -> Tensor:
        """Return the value of each example's game (B,)."""
        return self.each(z, batch)

    def metrics(self, outputs: Tensor, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean value."""
        return {"value_loss": float(outputs.double().mean())}


def games(clients: int = 4) -> Any:
    """Return clients of one example each, the first half of them of label 0 and the others of label 1."""
    label = np.arange(clients) * len(LABELS) // clients
    x = np.array(LABELS, dtype=np.float32)[label]
    return fedfleet.data.from_arrays(x, label, client=np.arange(clients), test=(x, label))


@cache
def _digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training examples in the order of their labels, and test examples: x (n, 64) float32, y (n,)."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.data[order] / 16 - 0.3).astype(np.float32), digits.target[order]
    test, train = (x[:TEST], y[:TEST]), (x[TEST:], y[TEST:])
    by_label = np.argsort(train[1], kind="stable")
    return train[0][by_label], train[1][by_label], *test


def digits(regions: int = 1) -> Any:
    """Return 40 clients of 35 digits in the order of their labels, in regions of consecutive ones, and 397 test digits."""
    x, y, test_x, test_y = _digits()
    client = np.arange(len(y)) // PER_CLIENT
    region = None if regions == 1 else client * regions // CLIENTS
    return fedfleet.data.from_arrays(x, y, client=client, domain=region, test=(test_x, test_y))


@cache
def _fashion(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return Fashion-MNIST's training examples client by client, and test examples: x (n, 784) float32, y (n,).

    Each of 100 clients holds 200 of them, with shares of labels of its own draw of Dirichlet(0.1); no two hold the same example.
    Clients are numbered in the order of the label that they hold most of.
    """
    found = load_fashion_mnist(folder)
    dealt = inner_dirichlet(found.train.y, FASHION_CLIENTS, 0, 0.1, [FASHION_EACH] * FASHION_CLIENTS)
    rows = dealt.indices.numpy().reshape(FASHION_CLIENTS, FASHION_EACH)
    y = found.train.y.numpy()
    most = [np.bincount(y[row], minlength=CLASSES).argmax() for row in rows]
    rows = rows[np.argsort(most, kind="stable")].ravel()
    x, test_x = (
        part.x.numpy().reshape(-1, PIXELS).astype(np.float32) / 255 - 0.3 for part in (found.train, found.test)
    )
    return x[rows], y[rows], test_x, found.test.y.numpy()


def fashion(data_dir: Path, *, images: bool = False) -> Any:
    """Return those clients in five regions by their main labels, and 10,000 test examples; pixels (784,), or (1, 28, 28)."""
    x, y, test_x, test_y = _fashion(data_dir)
    x, test_x = (part.reshape(-1, 1, 28, 28) if images else part for part in (x, test_x))
    client = np.arange(len(y)) // FASHION_EACH
    region = client * REGIONS // FASHION_CLIENTS
    return fedfleet.data.from_arrays(x, y, client=client, domain=region, test=(test_x, test_y))


class AucRidge(Solved):
    """AUC maximisation (CDMA's objective) of a linear score, unclipped, with a ridge: convex in x and concave in y.

    x = (w, bias, a, b), y = alpha; the ridge is `ridge` / 2 times the squared norm of x. Class `positive` is ranked above the
    others.
    """

    def __init__(
        self, chances: tuple[float, ...] | None = None, positive: int = 0, prior: float = 0.1, ridge: float = 0.01
    ):
        self._positive, self._prior, self._ridge = positive, prior, ridge
        super().__init__(self._solve, CLIENTS, chances)

    def init(self, seed: int) -> dict[str, dict[str, Tensor]]:
        """Return zeros."""
        x = {"a": torch.zeros(()), "b": torch.zeros(()), "bias": torch.zeros(()), "w": torch.zeros(64)}
        return {"x": x, "y": {"alpha": torch.zeros(())}}

    def predict(self, z: Any, batch: Any) -> Tensor:
        """Return scores (B,)."""
        return batch.x @ z["x"]["w"] + z["x"]["bias"]

    def each(self, z: Any, batch: Any) -> Tensor:
        """Return the objective of each example (B,)."""
        x = z["x"]
        ridge = self._ridge / 2 * sum((leaf**2).sum() for leaf in x.values())
        return (
            auc_loss(self.predict(z, batch), batch.y == self._positive, x["a"], x["b"], z["y"]["alpha"], self._prior)
            + ridge
        )

    def _solve(self, weights: np.ndarray) -> np.ndarray:
        """Return the saddle (a, b, bias, w, alpha): where the gradient, which is linear, vanishes."""
        x, y, *_ = _digits()
        p, n = self._prior, len(y)
        share = np.repeat(weights, PER_CLIENT) / PER_CLIENT
        plus = (y == self._positive).astype(np.float64)
        features = np.column_stack([np.zeros((n, 2)), np.ones(n), x.astype(np.float64)])  # of the score
        size = features.shape[1]
        hessian = np.zeros((size, size))
        for entry, of, factor in ((0, plus, 1 - p), (1, 1 - plus, p)):
            rest = features.copy()
            rest[:, entry] -= 1.0  # score - a, or score - b
            hessian += 2 * factor * (rest * (share * of)[:, None]).T @ rest
        slope = 2 * features.T @ (share * (p * (1 - plus) - (1 - p) * plus))  # of the score, and with that of alpha
        system = np.zeros((size + 1, size + 1))
        system[:size, :size] = hessian + self._ridge * np.eye(size)
        system[:size, size] = system[size, :size] = slope
        system[size, size] = -2 * p * (1 - p)
        return np.linalg.solve(system, -np.append(slope, 0.0))

    def metrics(self, outputs: Tensor, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the area under the ROC curve."""
        from sklearn.metrics import roc_auc_score

        return {"auc": float(roc_auc_score((data["y"] == self._positive).numpy(), outputs.numpy()))}


class SoftmaxRidge(Solved):
    """Softmax regression with a bias, whose ridge is `ridge` / 2 times the squared norm of all parameters: strongly convex.

    Its solution is where no entry of the gradient is above `near`.
    """

    parts = ("x",)
    clients, features, near = CLIENTS, 64, 1e-10

    def __init__(self, chances: tuple[float, ...] | None = None, ridge: float = 0.001):
        self._ridge = ridge
        super().__init__(self._solve, self.clients, chances)
        right = lambda z, batch: (self.predict(z, batch).argmax(1) == batch.y).float()  # noqa: E731
        self.functions = {
            **self.functions,
            "per_example": lambda z, batch: {"accuracy": right(z, batch), "loss": self.each(z, batch)},
        }

    def init(self, seed: int) -> dict[str, dict[str, Tensor]]:
        """Return zeros."""
        return {"x": {"b": torch.zeros(CLASSES), "w": torch.zeros(self.features, CLASSES)}}

    def predict(self, z: Any, batch: Any) -> Tensor:
        """Return logits (B, 10)."""
        return batch.x @ z["x"]["w"] + z["x"]["b"]

    def each(self, z: Any, batch: Any) -> Tensor:
        """Return the objective of each example (B,)."""
        ridge = self._ridge / 2 * sum((leaf**2).sum() for leaf in z["x"].values())
        return cross_entropy(self.predict(z, batch), batch.y, reduction="none") + ridge

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the training examples, client by client, of which each has as many: x (n, features), y (n,)."""
        return _digits()[:2]

    def _solve(self, weights: np.ndarray) -> np.ndarray:
        """Return the optimum (b, w) by L-BFGS in double precision."""
        x, y = self.examples()
        each = len(y) // self.clients
        batch = Batch({"x": torch.from_numpy(x).double(), "y": torch.from_numpy(y)}, torch.ones(len(y)).double())
        share = torch.from_numpy(np.repeat(weights, each) / each)
        z = {"x": {name: leaf.double().requires_grad_() for name, leaf in self.init(0)["x"].items()}}
        leaves = [z["x"][name] for name in ("b", "w")]
        search = torch.optim.LBFGS(
            leaves,
            max_iter=2000,
            tolerance_grad=self.near,
            tolerance_change=0.0,
            history_size=50,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            search.zero_grad()
            value = (self.each(z, batch) * share).sum()
            value.backward()
            return value

        search.step(closure)
        return torch.cat([leaf.detach().flatten() for leaf in leaves]).numpy()

    def metrics(self, outputs: Tensor, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean loss without the ridge, the accuracy, and that on the class that is classified worst."""
        y = data["y"]
        accuracy, loss = (outputs.argmax(1) == y).double().mean(), cross_entropy(outputs.double(), y)
        return {"accuracy": float(accuracy), "worst_class_score": worst_class_score(outputs, y), "loss": float(loss)}


def worst_class_score(outputs: Tensor, y: Tensor) -> float:
    """Return the accuracy on the class that is classified worst, of logits (m, C) and labels (m,)."""
    right = (outputs.argmax(1) == y).double()
    return min(float(right[y == c].mean()) for c in y.unique())


class FashionRidge(SoftmaxRidge):
    """The same on Fashion-MNIST; its solution takes half a minute, so that it is found only when it is asked for."""

    clients, features, near = FASHION_CLIENTS, PIXELS, 1e-6

    def __init__(self, ridge: float = 0.0001):
        super().__init__(ridge=ridge)
        self._found: dict[bytes, np.ndarray] = {}

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the training examples, client by client."""
        return _fashion(usual_data_dir())[:2]

    def model_metrics(self, z: Any) -> dict[str, float]:
        """Return nothing, for the solution is not known during a run."""
        return {}

    def _solve(self, weights: np.ndarray) -> np.ndarray:
        """Return the optimum (b, w), found once for the same weights."""
        if (known := weights.tobytes()) not in self._found:
            self._found[known] = super()._solve(weights)
        return self._found[known]
