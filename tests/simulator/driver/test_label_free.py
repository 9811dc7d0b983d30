"""Label-free measures of predictions."""

import math

import pytest
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.driver import label_free as L


def by_hand(p: torch.Tensor) -> tuple[float, float, float]:
    rows = p.tolist()
    entropy = lambda q: -sum(x * math.log(x) for x in q if x)  # noqa: E731
    mean = [sum(r[k] for r in rows) / len(rows) for k in range(len(rows[0]))]
    certain = sum(map(entropy, rows)) / len(rows)
    total = 0.0
    for i, a in enumerate(rows):
        others = [b for j, b in enumerate(rows) if j != i]
        inner = [sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b)) for b in others]
        like = [v / 0.05 for v in inner]
        top = max(like)
        weights = [math.exp(v - top) for v in like]
        total += entropy([w / sum(weights) for w in weights])
    return certain, entropy(mean) - certain, total / len(rows)


def test_against_their_formulas(monkeypatch):
    p = (2 * rng.normal(rng.key(4), (11, 4), torch.float64)).softmax(1)
    for rows in (1000, 3):
        monkeypatch.setattr(L, "ROWS", rows)
        found = L.label_free(p)
        assert [found["entropy"], found["information"], found["density"]] == pytest.approx(by_hand(p), rel=1e-9)


def test_at_their_ends():
    same = L.label_free(torch.tensor([[1.0, 0.0]] * 6))
    assert same["entropy"] == same["information"] == 0
    assert same["density"] == pytest.approx(math.log(5))  # all others are neighbours alike
    spread = L.label_free(torch.eye(3).repeat(4, 1))
    assert spread["information"] == pytest.approx(math.log(3))
    assert spread["density"] == pytest.approx(math.log(3), abs=1e-6)  # the three others of the same class
    unsure = L.label_free(torch.full((5, 4), 0.25))
    assert unsure["entropy"] == pytest.approx(math.log(4))
    assert unsure["information"] == pytest.approx(0, abs=1e-12)
    assert L.label_free(torch.eye(1))["density"] == 0
