"""Drawn features: what is predicted of them, and how the net begins."""

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch.distributions import Normal, kl_divergence

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import Batch
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.stochastic import Stochastic, StochasticOptions, divergence

SHAPE, LATENT, SAMPLES = DataShape((1, 8, 8), 10), 6, 7
TASK = Stochastic(StochasticOptions(hidden=(5,), latent=LATENT, samples=SAMPLES), SHAPE)
Z = T.map(lambda v: rng.normal(rng.key(v.numel()), tuple(v.shape)), TASK.init(0))
X, Y = rng.normal(rng.key(1), (9, 1, 8, 8)), torch.arange(9)


def batch(x=X, y=Y) -> Batch:
    return Batch({"x": x, "y": y}, torch.ones(len(x)))


def test_probabilities_are_averaged_over_draws_of_the_features():
    p = Z["x"]
    h = (X.flatten(1) @ p["encoder.1.weight"].T + p["encoder.1.bias"]).relu()
    out = h @ p["encoder.3.weight"].T + p["encoder.3.bias"]
    mu, sigma = out[:, :LATENT], F.softplus(out[:, LATENT:])
    total = torch.zeros(9, 10)
    for noise in rng.normal(rng.key(0), (SAMPLES, LATENT)):
        total += ((mu + sigma * noise) @ p["head.weight"].T + p["head.bias"]).softmax(1)
    found = TASK.functions["predict"](Z, batch())
    torch.testing.assert_close(found.exp(), total / SAMPLES, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(TASK.probabilities(found), total / SAMPLES, rtol=1e-4, atol=1e-6)
    each = TASK.functions["per_example"](Z, batch())
    torch.testing.assert_close(each["loss"], -(total / SAMPLES).log()[range(9), Y], rtol=1e-4, atol=1e-4)
    assert each["accuracy"].tolist() == (total.argmax(1) == Y).float().tolist()
    measured = TASK.metrics(found, {"y": Y})
    assert measured["loss"] == pytest.approx(float(each["loss"].mean()), rel=1e-5)
    assert measured["accuracy"] == pytest.approx(float(each["accuracy"].mean()))


def test_what_is_predicted_of_an_example_is_its_own_affair():
    whole = TASK.functions["predict"](Z, batch())
    parts = torch.cat([TASK.functions["predict"](Z, batch(x, y)) for x, y in zip(X.split(4), Y.split(4), strict=True)])
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-5)


def test_training_draws_each_example_anew_from_the_key():
    train = TASK.objectives["train"].loss
    twice = batch(X[:1].repeat(2, 1, 1, 1), Y[:1].repeat(2))
    one, other = (train(Z, twice.only(torch.tensor(row)), None, rng.key(3))[0] for row in ([1, 0], [0, 1]))
    assert float((one - other).abs()) > 1e-3
    assert float((train(Z, batch(), None, rng.key(3))[0] - train(Z, batch(), None, rng.key(4))[0]).abs()) > 1e-3
    assert torch.equal(train(Z, batch(), None, rng.key(3))[0], train(Z, batch(), None, rng.key(3))[0])


def test_the_divergence_is_torchs():
    mu, sigma, r_mu, r_sigma = (rng.normal(rng.key(i), (5, 3), torch.float64) for i in range(4))
    wanted = kl_divergence(Normal(mu, sigma.abs()), Normal(r_mu, r_sigma.abs())).sum(1)
    torch.testing.assert_close(divergence(mu, sigma, r_mu, r_sigma), wanted)
    torch.testing.assert_close(divergence(mu, sigma, mu, sigma), torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("deviation", [1e-20, -1e-30, 1e-37])
def test_small_deviations_have_a_divergence_in_single_precision(deviation):
    sigma = torch.full((2, 3), deviation, requires_grad=True)
    found = divergence(torch.zeros(2, 3), sigma, torch.zeros(2, 3), torch.ones(2, 3))
    torch.testing.assert_close(found, torch.full((2,), 3 * (-math.log(abs(deviation)) - 0.5)))
    (slope,) = torch.autograd.grad(found.sum(), sigma)
    torch.testing.assert_close(slope, -1 / sigma)


def test_padding_whose_deviation_is_nothing_does_no_harm():
    """As BatchNorm of few real rows may make it."""
    z = {**Z, **TASK.reference(Z)}
    grads = []
    for x in (X, torch.cat([X[:3], 1e6 * X[3:]])):
        rows = Batch({"x": x, "y": Y}, torch.arange(9).lt(3).float())
        leaves = T.map(lambda leaf: leaf.clone().requires_grad_(), z)
        value = TASK.objectives["fedsr"].loss(leaves, rows, {"l2r": 0.1, "cmi": 0.2}, rng.key(0))[0]
        grads.append(torch.autograd.grad(value, T.leaves(leaves)))
    for one, other in zip(*grads, strict=True):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other)


def test_layers_begin_with_draws_of_their_own():
    x = TASK.init(0)["x"]
    first, head = x["encoder.1.weight"].flatten(), x["head.weight"].flatten()
    n = min(len(first), len(head))
    uniform = (first[:n] * 64**0.5, head[:n] * LATENT**0.5)  # on [-1, 1], both
    assert abs(float(torch.corrcoef(torch.stack(uniform))[0, 1])) < 0.5
    reference = TASK.reference(TASK.init(0))["p"]
    assert {n: (tuple(v.shape), float(v.sum())) for n, v in reference.items()} == {
        "mu": ((10, LATENT), 0.0),
        "sigma": ((10, LATENT), 10.0 * LATENT),
        "scale": ((), 1.0),
    }


def test_statistics_of_layers_are_carried():
    task = Stochastic(StochasticOptions(model="cnn_bn", latent=3), SHAPE)
    z = task.init(0)
    assert set(z["b"]) == {f"encoder.{i}.running_{s}" for i in (1, 5) for s in ("mean", "var")}
    _, aux = task.objectives["train"].loss(z, batch(), None, rng.key(0))
    assert all(not torch.equal(aux["b"][name], leaf) for name, leaf in z["b"].items())


def test_a_resnets_last_layer_gives_means_and_deviations():
    shape, x = DataShape((3, 32, 32), 10), rng.normal(rng.key(1), (3, 3, 32, 32))
    task = Stochastic(StochasticOptions(model="resnet18", weights="random", norm="group", latent=LATENT), shape)
    z = task.init(0)
    assert z["x"]["encoder.1.fc.weight"].shape == (2 * LATENT, 512)
    assert task.parts == ("x",)  # GroupNorm counts nothing
    assert Stochastic(StochasticOptions(model="resnet18", weights="random"), shape).parts == ("x", "b")
    value, _ = task.objectives["fedsr"].loss(
        {**z, **task.reference(z)}, batch(x, Y[:3]), {"l2r": 0.1, "cmi": 0.1}, rng.key(0)
    )
    assert value.isfinite()
    assert task.functions["predict"](z, batch(x, Y[:3])).exp().sum(1).tolist() == pytest.approx([1.0] * 3, rel=1e-5)
    for given, line in (
        ({"model": "cnn", "weights": "random"}, "weights=random is not for model=cnn: leave it out"),
        ({"model": "cnn", "norm": "group"}, "norm=group is not for model=cnn: leave it out"),
        (
            {"model": "resnet18", "weights": "random", "norm": "frozen"},
            "norm=frozen keeps statistics that weights=random",
        ),
    ):
        with pytest.raises(ValidationError, match=line):
            StochasticOptions(**given)


def test_features_without_numbers_below_zero_or_all_alike_are_refused():
    with pytest.raises(ValidationError, match="model=lenet_relu has no outputs below 0"):
        StochasticOptions(model="lenet_relu")
    with pytest.raises(ValidationError, match="init=zero: features that are all alike"):
        StochasticOptions(init="zero")
