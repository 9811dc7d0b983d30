"""The setting of FedAU's code for Fashion-MNIST: how it deals the examples, and its net.

S. Wang and M. Ji, "A lightweight method for tackling unknown participation statistics in federated averaging", ICLR 2024;
github.com/IBM/fedau at 6e9cce9b, `util/util.py`, `dataset/dataset.py` and `model/cnn_mnist.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedfleet
from fedfleet.datasets.mnist import load_fashion_mnist

ALPHA, MEAN, SD = 0.1, 0.1307, 0.3081
CHANNELS, HIDDEN = 32, 128


def owners(y: np.ndarray, clients: int, seed: int) -> np.ndarray:
    """Return the client (n,) of each example: clients draw shares of labels, and each label is dealt in proportion to these."""
    shares = np.random.default_rng(seed).dirichlet(np.full(int(y.max()) + 1, ALPHA), clients)
    owner = np.empty(len(y), dtype=np.int64)
    for label, of in enumerate(shares.T):
        rows = np.flatnonzero(y == label)
        ends = np.round(len(rows) * of.cumsum() / of.sum()).astype(np.int64)
        owner[rows] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
    return owner


def fashion(clients: int, seed: int, data_dir: Path) -> Any:
    """Return Fashion-MNIST dealt to so many clients, with its 10,000 test examples."""
    found = load_fashion_mnist(data_dir)
    y = found.train.y.numpy()
    test = (found.test.x.numpy(), found.test.y.numpy())
    return fedfleet.data.from_arrays(found.train.x.numpy(), y, client=owners(y, clients, seed), test=test)


class Standardised(nn.Module):
    """Pixels as torchvision's ToTensor and Normalize give them, of bytes or of what nets here are given, -1 ... 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs (B, 1, 28, 28) of the code's scale."""
        return ((x + 1) / 2 - MEAN) / SD


def net(seed: int) -> nn.Module:
    """Return two convolutions with poolings and two linear layers, 211,690 weights, drawn as in the code."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = nn.Sequential(
            Standardised(),
            *(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(CHANNELS * 7 * 7, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)),
        )
        weighted = [layer for layer in made if isinstance(layer, nn.Conv2d | nn.Linear)]
        for layer in weighted[:-1]:  # the last keeps torch's own draw
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.get_parameter("bias"))
    return made
