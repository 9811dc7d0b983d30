"""Rect-4: points of the plane in two classes, of four users, each of whom sees a boundary of its own where there is one for all.

Nguyen et al., "Federated domain generalization with data-free on-server matching gradient", ICLR 2025, draw it and print no
numbers; this is a construction with the same behaviour. User j's points are, for y = -1 or 1 alike often and s = 1, -1, 1, -1,

    x1 = c + s y U(0.2, a),    x2 = y U(0.2, b),    c = -6, -2, 2, 6;  a = 2, 3, 2.5, 1.5;  b = 4, 2, 3, 5

and in training, as noise, x2 has the other sign in 15 of 100. For all users together the classes part at x2 = 0, for user j alone
best at x1 = c, from left to right for some and from right to left for others.
"""

from pathlib import Path

import torch
from torch import Tensor

from fedfleet.datasets.examples import Dataset, Examples
from fedfleet.simulator.arithmetic import rng

CENTRE, WIDTH, HEIGHT, SIDE = (-6.0, -2.0, 2.0, 6.0), (2.0, 3.0, 2.5, 1.5), (4.0, 2.0, 3.0, 5.0), (1, -1, 1, -1)
LEAST, NOISE, TRAIN, TEST = 0.2, 0.15, 500, 1000
KEY = rng.fold(rng.key(0), "rect4")


def load(folder: Path) -> Dataset:
    """Return the points, float32 (n, 2), with labels 0 and 1, of domains user1 to user4; `folder` is not read."""
    users = tuple(f"user{j + 1}" for j in range(len(CENTRE)))
    return Dataset("rect4", _points("train", TRAIN, NOISE), _points("test", TEST, 0.0), users)


def _points(part: str, count: int, noise: float) -> Examples:
    result = [_of_user(rng.fold(KEY, part, j), j, count, noise) for j in range(len(CENTRE))]
    domain = torch.arange(len(CENTRE)).repeat_interleave(count)
    return Examples(torch.cat([x for x, _ in result]), torch.cat([y for _, y in result]), 2, domain)


def _of_user(key: Tensor, j: int, count: int, noise: float) -> tuple[Tensor, Tensor]:
    u = rng.uniform(key, (4, count))
    y = (u[0] < 0.5).long()
    sign = 2.0 * y - 1
    x1 = CENTRE[j] + SIDE[j] * sign * (LEAST + (WIDTH[j] - LEAST) * u[1])
    x2 = sign * torch.where(u[3] < noise, -1.0, 1.0) * (LEAST + (HEIGHT[j] - LEAST) * u[2])
    return torch.stack([x1, x2], 1).float(), y
