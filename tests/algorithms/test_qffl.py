"""q-FFL: a round by hand, and FedAvg where q is 0."""

import pytest
import torch
from agnostic import at, world
from harness import build, digits, flat, play

from fedfleet.algorithms.options import CohortOptions

TWO = world([(1, -2), (1, -2), (1, -2)], [(3, 4)])
EVERYBODY = CohortOptions(size=2)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 3.0])
def test_a_round_by_hand(q):
    algorithm = build("qffl", TWO.task, EVERYBODY, q=q, steps=2, batch_size=3, lr=0.1)
    (z,) = play(algorithm, TWO, 1, z=at(1.0))
    total = weight = 0.0
    for examples, a, m in ((3, 1, -2), (1, 3, 4)):
        loss, w = a * (1 - m) ** 2 / 2, 1.0
        for _ in range(2):
            w -= 0.1 * a * (w - m)
        moved = (1 - w) / 0.1
        total += examples * loss**q * moved
        weight += examples * (q * loss ** (q - 1) * moved**2 + loss**q / 0.1)
    assert float(z["x"]["w"]) == pytest.approx(1 - total / weight, abs=1e-12)


def test_without_fairness_it_is_fedavg():
    where = digits("classification")
    few, same = CohortOptions(size=8), {"steps": 3, "batch_size": 7}
    for a, b in zip(
        play(build("qffl", where.task, few, q=0.0, **same), where, 3, inner="batched"),
        play(build("fedavg", where.task, few, **same), where, 3, inner="batched"),
        strict=True,
    ):
        torch.testing.assert_close(flat(a), flat(b), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_more_fairness_evens_out_the_losses():
    gaps = []
    for q in (0.0, 1.0, 5.0):
        algorithm = build("qffl", TWO.task, EVERYBODY, q=q, steps=1, batch_size=3, lr=0.1)
        w = float(play(algorithm, TWO, 120, z=at(1.0))[-1]["x"]["w"])
        gaps.append(abs((w + 2) ** 2 / 2 - 3 * (w - 4) ** 2 / 2))
    assert gaps[0] > gaps[1] > gaps[2]
