"""The l2-relaxed AUC objective: value, gradients, closed-form saddle; the metric."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import Batch
from fedfleet.tasks.auc import AucMaximisation, AucOptions, auc_loss
from fedfleet.tasks.options import DataShape

SCORE = torch.rand(200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
POSITIVE = torch.rand(200, generator=torch.Generator().manual_seed(4)) < 0.3
P = float(POSITIVE.double().mean())
PLUS, MINUS = SCORE[POSITIVE].mean(), SCORE[~POSITIVE].mean()


def mean_loss(a, b, alpha):
    return auc_loss(SCORE, POSITIVE, a, b, alpha, P).mean()


def test_value_at_zero():
    zero = torch.zeros((), dtype=torch.float64)
    plus, minus = POSITIVE.double(), (~POSITIVE).double()
    want = (1 - P) * SCORE**2 * plus + P * SCORE**2 * minus + 2 * (P * SCORE * minus - (1 - P) * SCORE * plus)
    assert mean_loss(zero, zero, zero).item() == pytest.approx(float(want.mean()), abs=1e-14)


def test_closed_form_saddle():
    a, b, alpha = (v.clone().requires_grad_() for v in (PLUS, MINUS, MINUS - PLUS))
    value = mean_loss(a, b, alpha)
    value.backward()
    assert [abs(float(v.grad)) for v in (a, b, alpha)] == pytest.approx([0, 0, 0], abs=1e-14)
    spread = SCORE[POSITIVE].var(correction=0) + SCORE[~POSITIVE].var(correction=0)
    assert value.item() == pytest.approx(float(P * (1 - P) * (spread + (1 - PLUS + MINUS) ** 2 - 1)), abs=1e-14)
    pairs = (1 - SCORE[POSITIVE][:, None] + SCORE[~POSITIVE][None]) ** 2
    assert value.item() == pytest.approx(float(P * (1 - P) * (pairs.mean() - 1)), abs=1e-14)
    assert mean_loss(a, b, alpha + 0.1).item() == pytest.approx(
        value.item() - P * (1 - P) * 0.01, abs=1e-14
    )  # concave, mu = 2p(1-p)
    assert mean_loss(a + 0.1, b, alpha).item() > value.item()
    assert mean_loss(a, b - 0.1, alpha).item() > value.item()


def test_descent_ascent_on_the_scalars_reaches_the_saddle():
    a = b = alpha = torch.zeros((), dtype=torch.float64)
    for _ in range(3000):
        leaves = [v.clone().requires_grad_() for v in (a, b, alpha)]
        g = torch.autograd.grad(mean_loss(*leaves), leaves)
        a, b, alpha = a - 0.3 * g[0], b - 0.3 * g[1], alpha + 0.3 * g[2]
    assert [float(v) for v in (a, b, alpha)] == pytest.approx(
        [float(PLUS), float(MINUS), float(MINUS - PLUS)], abs=1e-8
    )


def test_gradients_by_finite_differences():
    torch.autograd.gradcheck(
        lambda h, a, b, alpha: auc_loss(h, POSITIVE[:7], a, b, alpha, 0.1).mean(),
        tuple(v.clone().requires_grad_() for v in (SCORE[:7], PLUS, MINUS, MINUS - PLUS)),
    )


def test_examples_of_the_positive_class_alone_are_positive():
    """The task's own loss, with unequal classes, is the closed form of the class means of its scores; its metric is sklearn's."""
    made = AucMaximisation(AucOptions(model="logistic", positive_class=2, prior=0.3), DataShape((4,), 3))
    z = made.init(0)
    z["x"]["net"] = T.map(lambda leaf: 3 * leaf, z["x"]["net"])
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([2, 0, 1, 0, 0] * 8)
    batch = Batch({"x": x, "y": y}, torch.ones(40))
    h, plus = made.score(z, x).double(), y == 2
    value, _ = made.objectives["train"].loss(z, batch, None, torch.tensor(0))
    squares = 0.7 * 0.2 * h[plus].square().mean() + 0.3 * 0.8 * h[~plus].square().mean()
    want = squares + 2 * (0.3 * 0.8 * h[~plus].mean() - 0.7 * 0.2 * h[plus].mean())
    assert float(value) == pytest.approx(float(want), abs=1e-6)
    each = made.functions["per_example"](z, batch)
    assert float(each["loss"].mean()) == pytest.approx(float(want), abs=1e-6)
    assert torch.equal(each["score"], made.functions["predict"](z, batch))
    found = made.metrics(h, {"y": y})["auc"]
    assert found == pytest.approx(roc_auc_score((y == 2).numpy(), h.detach().numpy()), abs=1e-12)
    assert abs(found - 0.5) > 0.02  # the other class would be seen


def test_metric():
    task = AucMaximisation(AucOptions(model="logistic", positive_class=2), DataShape((4,), 3))
    labels = {"y": torch.tensor([2, 0, 1, 2])}
    assert task.metrics(torch.tensor([0.9, 0.1, 0.5, 0.4]), labels) == {"auc": 0.75}
    assert task.metrics(torch.tensor([0.9, float("nan"), 0.5, 0.4]), labels) == {"auc": 0.0}


def test_prior_defaults_to_one_class_of_all():
    task = AucMaximisation(AucOptions(model="logistic"), DataShape((4,), 5))
    assert task._prior == 0.2
    with pytest.raises(ValueError, match="positive_class"):
        AucMaximisation(AucOptions(model="logistic", positive_class=5), DataShape((4,), 5))


def test_score_is_one_entry_of_the_softmax():
    task = AucMaximisation(AucOptions(model="mlp", hidden=(5,)), DataShape((1, 8, 8), 10))
    score = task.score(task.init(0), torch.randn(6, 1, 8, 8))
    assert score.shape == (6,)
    assert bool(((score > 0) & (score < 1)).all())
