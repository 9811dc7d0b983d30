"""MixStyle: the law of its draws, the layer beside the released code's formula, and what it does to training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.special import betaincinv
from scipy.stats import beta, kstest
from torch import Tensor, nn

import fedfleet
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.work import Batch
from fedfleet.tasks.classification import Classification, ClassificationOptions
from fedfleet.tasks.mixstyle import MixStyle, MixStyleOptions, kept, style, with_mixstyle
from fedfleet.tasks.models import build
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.stateful import called, prepared
from tests.refusals import tells

ALWAYS = MixStyle(1.0, 0.4, "here")
X = 1 + 2 * rng.normal(rng.key(0), (6, 3, 4, 5), torch.float64)


def mixed(x: Tensor, key: int = 1, weight: Tensor | None = None, layer: nn.Module = ALWAYS) -> Tensor:
    weight = torch.ones(len(x)) if weight is None else weight
    return called(nn.Sequential(layer), {}, {}, x, weight=weight, key=rng.key(key))[0]


def by_hand(x: Tensor, key: Tensor, layer: MixStyle) -> Tensor:
    """The released code's formula, an image and a channel at a time."""
    key = rng.fold(key, layer.place)
    share = kept(rng.fold(key, "share"), len(x), layer.alpha)
    other = rng.partners(rng.fold(key, "partner"), torch.ones(len(x)) > 0)
    m, s = x.mean((2, 3)).detach(), (x.var((2, 3)) + 1e-6).sqrt().detach()
    rows = []
    for i, j in enumerate(other.tolist()):
        a = float(share[i])
        maps = [
            (x[i, c] - m[i, c]) / s[i, c] * (a * s[i, c] + (1 - a) * s[j, c]) + a * m[i, c] + (1 - a) * m[j, c]
            for c in range(x.shape[1])
        ]
        rows.append(torch.stack(maps))
    return torch.stack(rows)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.3, 1.0, 4.0, 30.0])
def test_shares_are_of_the_beta_distribution(alpha):
    key = rng.key(3)
    found, u = kept(key, 20_000, alpha), rng.uniform(key, 20_000, torch.float64)
    torch.testing.assert_close(found, torch.from_numpy(betaincinv(alpha, alpha, u.numpy())), rtol=0, atol=2e-5)
    small = found[found < 0.5]  # in double precision those near 1 are 1
    assert kstest(small.numpy(), lambda v: 2 * beta(alpha, alpha).cdf(v)).pvalue > 0.01
    assert float((found < 0.5).double().mean()) == pytest.approx(0.5, abs=0.02)


def test_the_layer_is_the_released_codes():
    torch.testing.assert_close(style(X), (X.mean((2, 3)), (X.var((2, 3)) + 1e-6).sqrt()))
    x = X.clone().requires_grad_()
    wanted = by_hand(x, rng.key(1), ALWAYS)
    torch.testing.assert_close(mixed(x), wanted)
    weights = rng.normal(rng.key(2), tuple(X.shape), torch.float64)
    mine, theirs = (torch.autograd.grad((v * weights).sum(), x)[0] for v in (mixed(x), wanted))
    torch.testing.assert_close(mine, theirs)  # nothing flows through styles
    assert float((wanted.detach() - X).abs().max()) > 0.1


def test_images_of_a_single_place_have_a_mean_alone():
    x = X[:, :, :1, :1]
    mean, deviation = style(x)
    assert torch.equal(mean, x[..., 0, 0])
    torch.testing.assert_close(deviation, torch.full_like(deviation, 1e-3))
    assert mixed(x).isfinite().all()


def test_partners_are_drawn_among_the_rows_that_count():
    real = torch.tensor([1, 0, 1, 1, 0]) > 0
    seen: dict[tuple[int, ...], int] = {}
    for k in range(3000):
        found = rng.partners(rng.key(k), real)
        assert sorted(found.tolist()) == [0, 1, 2, 3, 4]
        order = tuple(found[real].tolist())
        seen[order] = seen.get(order, 0) + 1
    assert set(seen) == {(0, 2, 3), (0, 3, 2), (2, 0, 3), (2, 3, 0), (3, 0, 2), (3, 2, 0)}
    assert all(count == pytest.approx(500, abs=100) for count in seen.values())


@pytest.mark.parametrize("more", [1, 5])
def test_padding_changes_nothing(more):
    garbage = torch.full((more, *X.shape[1:]), 1e6, dtype=torch.float64)
    weight = torch.tensor([1.0] * len(X) + [0.0] * more)
    assert torch.equal(mixed(torch.cat([X, garbage]), weight=weight)[: len(X)], mixed(X))


def test_a_batch_is_mixed_with_a_probability_and_outside_training_never():
    layer = MixStyle(0.3, 0.4, "here")
    changed = [not torch.equal(mixed(X, k, layer=layer), X) for k in range(400)]
    assert sum(changed) / 400 == pytest.approx(0.3, abs=0.08)
    assert torch.equal(mixed(X, layer=MixStyle(0.0, 0.4, "here")), X)
    assert all(map(torch.equal, (called(nn.Sequential(ALWAYS), {}, {}, X)[0], mixed(X, 5)), (X, mixed(X, 5))))
    assert not torch.equal(mixed(X, 5), mixed(X, 6))
    assert not torch.equal(mixed(X, 5), mixed(X, 5, layer=MixStyle(1.0, 0.4, "there")))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("model", ["cnn", "lenet", "convnet"])
def test_a_net_mixes_after_its_first_poolings(model, blocks):
    shape, options = (2, 20, 20), MixStyleOptions(p=1.0, alpha=0.4, blocks=blocks)
    plain, net = build(model, shape, 10, (), 0), with_mixstyle(prepared(build(model, shape, 10, (), 0)), options)
    plain, net = plain.double(), net.double()
    parameters = dict(net.named_parameters())
    assert parameters.keys() == dict(plain.named_parameters()).keys()
    x = rng.normal(rng.key(3), (5, *shape), torch.float64) * torch.tensor([1.0, 3.0, 9.0, 0.1, 5.0]).view(5, 1, 1, 1)
    wanted, pools = x, 0
    for name, layer in plain.named_children():
        wanted = layer(wanted)
        if name in ("2", "5"):
            pools += 1
            wanted = by_hand(wanted, rng.key(4), MixStyle(1.0, 0.4, name)) if pools <= blocks else wanted
    found = called(net, parameters, {}, x, weight=torch.ones(5), key=rng.key(4))[0]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(called(net, parameters, {}, x)[0], plain(x))
    assert float((found - plain(x)).detach().abs().max()) > 1e-2


BASE: dict[str, Any] = {
    "rounds": 2, "population": {"clients": 8, "partition": {"kind": "quantity_skew", "alpha": 1.0, "min_size": 3}},
    "task": {"name": "classification", "model": "cnn", "mixstyle": {"p": 0.7, "alpha": 0.4, "blocks": 2}},
    "algorithm": {"name": "fedavg", "lr": 0.1, "batch_size": 12, "steps": 2}, "cohort": {"size": 4},
    "executor": {"kind": "local", "inner": "serial"},
}  # fmt: skip


def trained(captures: Captures | None = None, **more: Any) -> Tensor:
    """The models after every round, in double precision."""
    x = fedfleet.Experiment(fedfleet.load(BASE, more))
    data = {**x.population.data, "x": x.population.data["x"].double()}
    setup = replace(x.setup(), population=replace(x.population, data=data), captures=captures or Captures(after=None))
    executor = x.executor()
    executor.start(setup)
    try:
        z = T.map(lambda leaf: leaf.double(), x.z)
        found = simulate(x.algorithm, z, x.problem, x.conditions(), executor, x.config.rounds)
        models = [x.algorithm.views["global"].params(record.state) for record in found]
    finally:
        executor.close()
    return torch.cat([leaf.flatten() for model in models for leaf in T.leaves(model)])


@pytest.mark.parametrize(("model", "name"), [("cnn", "fedrod"), ("cnn_bn", "fedavg")])
def test_many_at_once_are_one_at_a_time(model, name):
    given = {"task.model": model, "algorithm.name": name}
    one = trained(**given)
    for inner in ("batched", "factored"):
        torch.testing.assert_close(trained(**given, **{"executor.inner": inner}), one, rtol=1e-8, atol=1e-9)
    assert float((trained(**given, **{"task.mixstyle.p": 0.0}) - one).abs().max()) > 1e-3


@pytest.mark.slow
def test_a_captured_run_is_the_ordinary_one():
    given = {"executor.inner": "batched", "population.partition": {"kind": "iid"}, "rounds": 4}
    captures = Captures(after=0)
    assert torch.equal(trained(captures, **given), trained(**given))
    assert captures.ready


def test_without_probability_the_run_is_the_plain_one():
    assert torch.equal(trained(**{"task.mixstyle.p": 0.0}), trained(**{"task.mixstyle": None}))


def test_heads_and_bodies_are_cut_as_before():
    shape = DataShape((1, 8, 8), 10)
    task = Classification(ClassificationOptions(model="cnn", mixstyle=MixStyleOptions(p=1.0, alpha=0.4)), shape)
    plain = Classification(ClassificationOptions(model="cnn"), shape)
    assert task.leaves == plain.leaves
    z, x, y = task.init(0), rng.normal(rng.key(1), (6, 1, 8, 8)), torch.arange(6)
    batch = Batch({"x": x, "y": y}, torch.ones(6))
    assert torch.equal(task.functions["features"](z, batch), plain.functions["features"](z, batch))
    ctx = torch.ones(10)
    balanced = task.objectives["balanced"].loss(z, batch, ctx, rng.key(2))[0]
    torch.testing.assert_close(balanced, task.objectives["train"].loss(z, batch, None, rng.key(2))[0])
    assert float((balanced - plain.objectives["balanced"].loss(z, batch, ctx, rng.key(2))[0]).abs()) > 1e-3


def test_nets_without_convolutions_are_refused():
    for model in ("logistic", "mlp"):
        tells(lambda m=model: fedfleet.load(BASE, {"task.model": m}), f"mixstyle … model={model} is not")
    tells(lambda: fedfleet.load(BASE, {"task": {"name": "stochastic", "mixstyle": {}}}), "mixstyle")
