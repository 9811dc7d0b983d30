"""Gradients of single examples through ``ops``: one client's, many clients', whatever the leaves are."""

from __future__ import annotations

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
