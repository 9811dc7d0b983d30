"""Gradients of single examples through ``ops``: one client's, many clients', whatever the leaves are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.work import BUFFERS, Batch, Objective
from fedfleet.tasks.stateful import called, prepared
from tests.simulator.block.test_gradient import KEY, ROWS, batch_of, draw, minimax, point, two_players

SIGNS = {"x": 1.0, "y": -2.0, "fixed": 0.0}


def ops(loss: Any = minimax, **signs: float) -> EngineOps:
    return EngineOps({"train": Objective(loss=loss, sign={**SIGNS, **signs})}, {})


def row(batch: Batch, r: int) -> Batch:
    return Batch({k: v[r : r + 1] for k, v in batch.data.items()}, torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("wrt", [None, ("y",)])
def test_each_row_has_the_direction_that_it_gives_alone(wrt):
    z, batch, ctx = point(), batch_of(real=3), point(7)["x"]
    found, losses = ops().grads("train", z, batch, KEY, ctx=ctx, wrt=wrt)
    assert set(found) == ({"x", "y"} if wrt is None else {"y"})  # "fixed" is no player's
    for r in range(ROWS):
        alone, aux = ops().grad("train", z, row(batch, r), KEY, ctx=ctx, wrt=wrt)
        for part in found:
            assert_close(T.map(lambda g, r=r: g[r], found[part]), alone[part])
        assert_close(losses[r], aux["loss"])


def test_their_mean_is_the_direction_of_the_batch_and_its_loss_the_training_loss():
    z, batch, own = point(), batch_of(real=3), ops()
    found, _ = own.grads("train", z, batch, KEY)
    whole, aux = ops().grad("train", z, batch, KEY)
    assert_close(T.map(lambda g: g[:3].mean(0), found), {p: whole[p] for p in found})
    assert_close(own.loss, aux["loss"])


def test_clients_of_a_block_have_theirs_at_once():
    clients = 3
    z = T.stack([point(c) for c in range(clients)])
    data = T.stack([dict(batch_of(c, real=2 + c).data) for c in range(clients)])
    weight = torch.stack([batch_of(c, real=2 + c).weight for c in range(clients)])
    keys = rng.fold(KEY, torch.arange(clients))
    many = torch.func.vmap(lambda z, d, w, k: ops().grads("train", z, Batch(d, w), k), randomness="error")
    found, losses = many(z, data, weight, keys)
    for c in range(clients):
        one, mine = ops().grads("train", point(c), batch_of(c, real=2 + c), keys[c])
        assert_close(T.index(found, c), one)
        assert_close(losses[c], mine)


def test_rows_draw_apart_by_their_places_among_real_ones():
    net = prepared(nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 1, bias=False)))

    def loss(z: Any, batch: Batch, ctx: Any, key: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return batch.mean(called(net, z["x"], {}, batch.x, weight=batch.weight, key=key)[0][:, 0]), {}

    z = {"x": {"1.weight": torch.ones(1, 40)}}
    found = lambda weight: ops(loss).grads("train", z, Batch({"x": torch.ones(3, 40)}, weight), KEY)[0]["x"]["1.weight"]  # noqa: E731
    together, padded = found(torch.ones(3)), found(torch.tensor([0.0, 1.0, 1.0]))
    assert len({tuple(g.flatten().tolist()) for g in together}) == 3
    assert torch.equal(padded[1:], together[:2])


@pytest.mark.parametrize(
    ("loss", "parts", "says"),
    [(two_players, {}, "losses of their own"), (minimax, {BUFFERS: {"mean": draw("m", 2)}}, "BatchNorm")],
)
def test_what_has_no_gradients_of_single_examples_says_so(loss, parts, says):
    with pytest.raises(ValueError, match=says):
        ops(loss).grads("train", {**point(), **parts}, batch_of(), KEY)


class Every(nn.Module):
    """Layers of every kind: filters in groups and with strides, words, recurrence, one layer twice, rows that come to it often."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)
        self.more = nn.Conv2d(4, 3, 2, dilation=2)
        self.words = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.twice = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(3 + 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.more(torch.tanh(self.filters(x))).amax((2, 3))
        words = self.words((x.flatten(1)[:, :4].abs() * 3).long().clamp(max=4))
        read = torch.tanh(self.twice(torch.tanh(self.twice(self.norm(words))))).mean(1)
        return self.head(torch.cat([seen, read], 1))


@pytest.mark.parametrize("own", [True, False], ids=["weights of their own", "one that all share"])
def test_clipped_sums_are_those_of_gradients_written_down(own):
    """Of three clients with some rows that do not count, whatever the layers; the adversary's part counts three times."""
    clients, rows = 3, 4
    net = prepared(Every().double())

    def loss(z: Any, batch: Batch, ctx: Any, key: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x = batch.x + z["y"]["shift"] + 0.1 * rng.normal(key, (8, 8), torch.float64)
        out = called(net, z["x"], {}, x, weight=batch.weight, key=key)[0] * z["fixed"]["scale"]
        losses = torch.nn.functional.cross_entropy(out, batch.y, reduction="none")
        return batch.mean(losses) + T.dot(ctx, z["y"]), {}

    one = lambda c: {  # noqa: E731
        "x": {k: draw(k, *v.shape, seed=c) for k, v in net.named_parameters()},
        "y": {"shift": draw("shift", 2, 8, 8, seed=c)},
        "fixed": {"scale": draw("scale", 3, seed=c)},
    }
    z = T.stack([one(c) for c in range(clients)]) if own else one(0)
    data = {"x": draw("x", clients, rows, 2, 8, 8), "y": torch.arange(clients * rows).view(clients, rows) % 3}
    weight = (torch.arange(rows) < torch.tensor([[4], [2], [3]])).double()
    ctx = T.stack([{"shift": draw("c", 2, 8, 8, seed=c)} for c in range(clients)])
    keys = rng.fold(KEY, torch.arange(clients))
    there = EngineOps({"train": Objective(loss=loss, sign={"x": 1.0, "y": -3.0})}, {})

    def many(z: Any, data: Any, weight: Tensor, ctx: Any, key: Tensor) -> Any:
        return there.clipped("train", z, Batch(data, weight), key, norm, ctx=ctx)

    cut_at = []
    for norm in (1e9, 35.0, 0.01):
        found, losses = torch.func.vmap(many, in_dims=(0 if own else None, 0, 0, 0, 0))(z, data, weight, ctx, keys)
        for c in range(clients):
            batch = Batch(T.index(data, c), weight[c])
            here = T.index(z, c) if own else z
            each, alone = there.grads("train", here, batch, keys[c], ctx=T.index(ctx, c))
            norms = torch.stack([g.flatten(1).square().sum(1) for g in T.leaves(each)]).sum(0).sqrt()
            cut = (norm / norms).clamp(max=1.0) * weight[c]
            cut_at += (norms > norm).tolist()
            assert_close(T.index(found, c), T.map(lambda g, cut=cut: torch.tensordot(cut, g, 1), each))
            assert_close(losses[c], alone)
            # One client at a time, they are written down.
            assert_close(there.clipped("train", here, batch, keys[c], norm, ctx=T.index(ctx, c))[0], T.index(found, c))
    assert cut_at[:12] == [False] * 12
    assert 0 < sum(cut_at[12:24]) < 12
    assert [*there._notes.dense.values()] == [{"x.words.weight"}]


def test_no_clipped_gradient_is_longer_than_the_norm():
    """Of a single row: the sum is its own, cut."""
    z, data = T.stack([point(c) for c in range(2)]), dict(batch_of(rows=1).data)
    sums, _ = torch.func.vmap(lambda z: ops().clipped("train", z, Batch(data, torch.ones(1).double()), KEY, 0.05))(z)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in T.leaves(sums)]).sum(0).sqrt()
    assert_close(norms, torch.full_like(norms, 0.05))


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_gradients_of_examples_are_those_of_opacus():
    """Of a net of filters and linear layers: each example's norm, and the sum of what is clipped."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 49, 16), nn.ReLU(), nn.Linear(16, 10))  # noqa: E501  # fmt: skip
    x, y = torch.randn(12, 1, 14, 14), torch.arange(12) % 10
    start = {k: v.detach().clone() for k, v in net.named_parameters()}
    theirs = GradSampleModule(copy.deepcopy(net))
    optimizer = DPOptimizer(torch.optim.SGD(theirs.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=12)  # noqa: E501  # fmt: skip
    torch.nn.functional.cross_entropy(theirs(x), y).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in theirs.parameters()]).norm(dim=0)
    optimizer.step()
    moved = {
        k.removeprefix("_module."): start[k.removeprefix("_module.")] - v.detach() for k, v in theirs.named_parameters()
    }

    def loss(z: Any, batch: Batch, ctx: Any, key: Any) -> tuple[Tensor, dict[str, Tensor]]:
        out = torch.func.functional_call(net, z["x"], (batch.x,))
        return batch.mean(torch.nn.functional.cross_entropy(out, batch.y, reduction="none")), {}

    batch, own = Batch({"x": x, "y": y}, torch.ones(12)), ops(loss)
    each, _ = own.grads("train", {"x": start}, batch, KEY)
    assert_close(torch.stack([g.flatten(1).norm(dim=1) for g in T.leaves(each)]).norm(dim=0), norms)
    many = torch.func.vmap(lambda z, d: own.clipped("train", z, Batch(d, batch.weight), KEY, 0.5)[0])
    found = many({"x": {k: v.expand(2, *v.shape) for k, v in start.items()}}, {k: v.expand(2, *v.shape) for k, v in batch.data.items()})  # noqa: E501  # fmt: skip
    for k, v in moved.items():
        assert_close(found["x"][k][1] / 12, v, rtol=1e-4, atol=1e-6)


def looked_up(z: Any, batch: Batch, ctx: Any, key: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights side by side in one product, one as a bias, a penalty by a derivative; numbers besides that are no tensors."""
    a, b = z["x"]["a"], z["x"]["b"]
    out = torch.nn.functional.linear(batch.x, torch.cat([a, b])) + torch.nn.functional.linear(batch.x[:, :2], z["x"]["c"], z["x"]["a"][:, 0])  # noqa: E501  # fmt: skip
    slope = torch.func.grad(lambda x: torch.nn.functional.linear(x, z["x"]["d"]).square().sum())(batch.x)
    losses = out.square().mean(1) + ctx["weight"] * slope.square().mean(1)
    return batch.mean(losses), {}


def test_weights_that_are_used_in_other_ways_have_copies():
    shapes = {"a": (3, 3), "b": (0, 3), "c": (3, 2), "d": (2, 3)}
    one = lambda c: {"x": {k: draw(k, *shape, seed=c) for k, shape in shapes.items()}}  # noqa: E731
    z, batch, own = T.stack([one(c) for c in range(2)]), batch_of(), EngineOps({"train": Objective(loss=looked_up, sign={"x": 1.0})}, {})  # noqa: E501  # fmt: skip
    data = T.stack([dict(batch.data)] * 2)
    many = torch.func.vmap(
        lambda z, d: own.clipped("train", z, Batch(d, batch.weight), KEY, 1.0, ctx={"weight": 0.5})[0]
    )
    found = many(z, data)
    for c in range(2):
        assert_close(T.index(found, c), own.clipped("train", one(c), batch, KEY, 1.0, ctx={"weight": 0.5})[0])


def test_no_norm_is_lost_to_small_numbers():
    """Inputs of 1e-24, whose squares are nothing in single precision, and gradients of 1e18."""
    loss = lambda z, batch, ctx, key: (batch.mean(1e18 * torch.nn.functional.linear(batch.x, z["x"]["w"])[:, 0]), {})  # noqa: E731
    own = EngineOps({"train": Objective(loss=loss, sign={"x": 1.0})}, {})
    z, x = {"x": {"w": torch.zeros(1, 1, 100_000)}}, torch.full((1, 1, 100_000), 1e-24)
    found, _ = torch.func.vmap(lambda z, x: own.clipped("train", z, Batch({"x": x}, torch.ones(1)), KEY, 1e-5))(z, x)
    assert float(found["x"]["w"].double().norm()) == pytest.approx(1e-5, rel=1e-3)
