from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.work import Batch, Objective
from fedfleet.tasks.auc import AucMaximisation, AucOptions
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, ModelOptions

KEY = rng.key(0)
ROWS = 5


def draw(name: str, *shape: int, seed: int = 0) -> Tensor:
    return rng.normal(rng.fold(rng.key(seed), name), shape, torch.float64)


def point(seed: int = 0) -> dict[str, Any]:
    """A net of one hidden layer (x), a linear adversary of its inputs (y), and a scale that is no player's."""
    net = {"a": draw("a", 3, 4, seed=seed), "b": (draw("b", 4, seed=seed), draw("c", 4, 2, seed=seed))}
    return {"x": net, "y": {"shift": draw("shift", 3, seed=seed)}, "fixed": draw("fixed", seed=seed)}


def batch_of(seed: int = 0, rows: int = ROWS, real: int = ROWS) -> Batch:
    y = (draw("labels", rows, seed=seed) > 0).to(torch.int64)
    weight = (torch.arange(rows) < real).to(torch.float64)
    return Batch({"x": draw("inputs", rows, 3, seed=seed), "y": y}, weight)


def outputs(z: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh((x + z["y"]["shift"]) @ z["x"]["a"] + z["x"]["b"][0])
    return z["fixed"] * (hidden @ z["x"]["b"][1])


def each(z: Any, batch: Batch) -> Tensor:
    penalty = 0.5 * (z["y"]["shift"] ** 2).sum()
    return torch.nn.functional.cross_entropy(outputs(z, batch.x), batch.y, reduction="none") - penalty


def minimax(z: Any, batch: Batch, ctx: Any, key: Any) -> tuple[Tensor, dict[str, Tensor]]:
    anchor = 0.0 if ctx is None else T.dot(ctx, z["x"])
    value = batch.mean(each(z, batch)) + anchor
    return value, {"double": 2 * value, "rows": batch.count()}


def two_players(z: Any, batch: Batch, ctx: Any, key: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    value = batch.mean(each(z, batch))
    return {"x": value, "y": value**2 + z["y"]["shift"].sin().sum()}, {"value": value}


def random_features(z: Any, batch: Batch, ctx: Any, key: Any) -> tuple[Tensor, dict[str, Tensor]]:
    noise = rng.normal(key, (3,), torch.float64)
    return batch.mean(each(z, Batch({**batch.data, "x": batch.x + noise}, batch.weight))), {}


SIGN = {"x": 1, "y": -1, "fixed": 0}
OBJECTIVES = {
    "minimax": Objective(loss=minimax, sign=SIGN),
    "frozen x": Objective(loss=minimax, sign={"y": -1}),
    "players": Objective(loss=two_players, sign={"x": 1, "y": 1}),
    "one of two players": Objective(loss=two_players, sign={"x": 0, "y": 1}),
    "scaled": Objective(loss=minimax, sign={"x": 0.5, "y": -3.0, "fixed": 2}),
    "keyed": Objective(loss=random_features, sign=SIGN),
}


def ops() -> EngineOps:
    return EngineOps(OBJECTIVES, {})


def reference(loss: Callable[[Any], Tensor], z: Any, part: str) -> Any:
    """Differentiate one part with plain autograd."""
    free = T.map(lambda v: v.clone().requires_grad_(), z)
    return T.unflatten(z[part], torch.autograd.grad(loss(free), T.leaves(free[part])))


def assert_trees_close(a: Any, b: Any, **tolerance: float) -> None:
    assert [n for n, _ in T.named_leaves(a)] == [n for n, _ in T.named_leaves(b)]
    for x, y in zip(T.leaves(a), T.leaves(b), strict=True):
        assert_close(x, y, **tolerance)


@pytest.mark.parametrize("name", ["minimax", "scaled"])
def test_the_direction_is_the_gradient_times_the_sign(name):
    z, batch = point(), batch_of()
    found, aux = ops().grad(name, z, batch, KEY)
    value = minimax(z, batch, None, KEY)[0]
    for part, sign in OBJECTIVES[name].sign.items():
        plain = reference(lambda free: minimax(free, batch, None, KEY)[0], z, part)
        assert_trees_close(found[part], T.scale(sign, plain))
    assert_close(aux["loss"], value)
    assert_close(aux["double"], 2 * value)
    assert float(aux["rows"]) == ROWS
    assert not any(leaf.requires_grad for leaf in T.leaves((found, dict(aux))))


def test_the_gradient_is_that_of_finite_differences():
    z, batch, h = point(), batch_of(), 1e-6
    towards = {part: point(9)[part] if part != "fixed" else torch.zeros(()) for part in z}
    ahead, behind = (minimax(T.axpy(s * h, towards, z), batch, None, KEY)[0] for s in (1, -1))
    found, _ = ops().grad("minimax", z, batch, KEY)
    slope = T.dot(found["x"], towards["x"]) - T.dot(found["y"], towards["y"])
    assert_close(slope, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)


def test_frozen_parts_and_parts_outside_wrt_get_zeros():
    z, batch = point(), batch_of()
    full, _ = ops().grad("minimax", z, batch, KEY)
    only_y, _ = ops().grad("minimax", z, batch, KEY, wrt=("y",))
    frozen, _ = ops().grad("frozen x", z, batch, KEY)
    for found in (only_y, frozen):
        assert_trees_close(found, {"x": T.zeros_like(z["x"]), "y": full["y"], "fixed": torch.zeros_like(z["fixed"])})
    assert float(full["fixed"]) == 0


def test_with_nothing_to_train_the_direction_is_zero_and_the_loss_is_still_told():
    z, batch = point(), batch_of()
    found, aux = ops().grad("minimax", z, batch, KEY, wrt=())
    assert_trees_close(found, T.zeros_like(z))
    assert_close(aux["loss"], minimax(z, batch, None, KEY)[0])


def test_a_loss_that_does_not_depend_on_a_trained_part_gives_it_zeros():
    free = Objective(loss=lambda z, b, c, k: ((z["x"] ** 2).sum(), {}), sign={"x": 1, "y": -1})
    z = {"x": torch.ones(2), "y": torch.ones(3)}
    for wrt in (None, ("y",)):
        found, _ = EngineOps({"o": free}, {}).grad("o", z, batch_of(), KEY, wrt=wrt)
        assert_trees_close(found, {"x": 2 * z["x"] if wrt is None else torch.zeros(2), "y": torch.zeros(3)})


def test_each_player_gets_the_gradient_of_its_own_loss():
    z, batch = point(), batch_of()
    found, aux = ops().grad("players", z, batch, KEY)
    for part in ("x", "y"):
        expected = reference(lambda free, p=part: two_players(free, batch, None, KEY)[0][p], z, part)
        assert_trees_close(found[part], expected)
    assert_close(aux["loss"], aux["value"])  # the first player's
    alone, _ = ops().grad("one of two players", z, batch, KEY)
    assert_trees_close(alone, {**found, "x": T.zeros_like(z["x"])})
    assert_trees_close(ops().grad("players", z, batch, KEY, wrt=("y",))[0], alone)


def test_a_loss_for_no_part_is_refused():
    z = {"x": torch.ones(2)}
    wrong = Objective(loss=lambda z, b, c, k: ({"generator": z["x"].sum()}, {}), sign={"x": 1})
    with pytest.raises(ValueError, match=r"losses for \['generator'\], but the parts are \['x'\]"):
        EngineOps({"o": wrong}, {}).grad("o", z, batch_of(), KEY)


def test_context_and_key_reach_the_objective():
    z, batch = point(), batch_of()
    plain, _ = ops().grad("minimax", z, batch, KEY)
    shifted, _ = ops().grad("minimax", z, batch, KEY, ctx=point(3)["x"])
    assert_trees_close(T.sub(shifted["x"], plain["x"]), point(3)["x"])
    one, two = (ops().grad("keyed", z, batch, rng.key(s))[0] for s in (1, 2))
    assert not torch.equal(one["x"]["a"], two["x"]["a"])


def test_the_loss_of_the_first_gradient_is_remembered():
    engine = ops()
    assert engine.loss is None
    _, first = engine.grad("minimax", point(), batch_of(), KEY)
    engine.grad("minimax", point(1), batch_of(), KEY)
    assert engine.loss is not None
    assert_close(engine.loss, first["loss"])


def test_step_projects_the_moved_point():
    def clip(z: Any) -> Any:
        return {"x": T.map(lambda v: v.clamp(-1, 1), z["x"]), "y": z["y"], "fixed": z["fixed"]}

    box = EngineOps({"o": Objective(loss=minimax, sign=SIGN, project=clip)}, {})
    z, d = point(), point(4)
    lr = {"x": 5.0, "y": 0.5, "fixed": 0.0}
    moved = {part: T.axpy(-lr[part], d[part], z[part]) for part in z}
    assert max(float(leaf.abs().max()) for leaf in T.leaves(moved["x"])) > 1
    assert_trees_close(box.step("o", z, lr, d), clip(moved))
    assert_trees_close(ops().step("minimax", z, lr, d), moved)


def test_apply_evaluates_a_function_of_the_task():
    engine = EngineOps({}, {"predict": lambda z, batch: outputs(z, batch.x)})
    assert_close(engine.apply("predict", point(), batch_of()), outputs(point(), batch_of().x))


@given(
    objective=st.sampled_from(list(OBJECTIVES)),
    shared=st.sampled_from([(), ("x", "y", "fixed"), ("x",), ("y", "fixed")]),
    with_context=st.booleans(),
)
def test_under_vmap_every_client_gets_its_own_gradient(objective, shared, with_context):
    clients = 4
    points = [{p: point(0 if p in shared else c)[p] for p in point()} for c in range(clients)]
    batches = [batch_of(c, real=ROWS - c) for c in range(clients)]
    contexts = [point(20 + c)["x"] for c in range(clients)]
    keys = rng.fold(KEY, torch.arange(clients))

    def one(z: Any, data: Any, weight: Tensor, ctx: Any, key: Tensor) -> Any:
        return ops().grad(objective, z, Batch(data, weight), key, ctx=ctx if with_context else None)

    expected = [
        one(z, dict(b.data), b.weight, c, k) for z, b, c, k in zip(points, batches, contexts, keys, strict=True)
    ]
    stacked = T.stack(points)
    z = {p: points[0][p] if p in shared else stacked[p] for p in stacked}
    mine = {p: z[p] for p in z if p not in shared}  # shared parts are closed over, so their in_dims are None
    data, weight = T.stack([dict(b.data) for b in batches]), torch.stack([b.weight for b in batches])
    args = (mine, data, weight, T.stack(contexts), keys)
    together = torch.func.vmap(lambda part, *rest: one({p: part.get(p, z[p]) for p in z}, *rest))(*args)
    for i, (direction, aux) in enumerate(expected):
        assert_trees_close(T.index(together[0], i), direction, rtol=1e-6, atol=1e-9)
        assert_trees_close(T.index(dict(together[1]), i), dict(aux), rtol=1e-6, atol=1e-9)


def test_batched_leaves_may_have_any_axis_in_front():
    z = T.stack([point(c) for c in range(3)])
    sideways = T.map(lambda v: v.movedim(0, -1), z)
    batch = batch_of()

    def one(z: Any) -> Any:
        return ops().grad("minimax", z, batch, KEY)[0]

    assert_trees_close(torch.func.vmap(one, in_dims=-1)(sideways), torch.func.vmap(one)(z))


def test_the_batch_alone_may_differ_between_clients():
    z = point()
    weights = torch.stack([batch_of(real=r).weight for r in (1, 3, 5)])
    found = torch.func.vmap(lambda w: ops().grad("minimax", z, Batch(batch_of().data, w), KEY)[0])(weights)
    for i, real in enumerate((1, 3, 5)):
        alone, _ = ops().grad("minimax", z, batch_of(real=real), KEY)
        cut = Batch({k: v[:real] for k, v in batch_of().data.items()}, torch.ones(real, dtype=torch.float64))
        assert_trees_close(T.index(found, i), alone)
        assert_trees_close(T.index(found, i), ops().grad("minimax", z, cut, KEY)[0])


SHAPE = DataShape((1, 8, 8), 10)
TASKS = {
    "classification": Classification(ModelOptions(model="mlp", hidden=(8,)), SHAPE),
    "auc": AucMaximisation(AucOptions(model="mlp", hidden=(8,)), SHAPE),
}


def task_batch(seed: int, rows: int) -> dict[str, Tensor]:
    k = rng.key(seed)
    x = rng.normal(rng.fold(k, "x"), (rows, 1, 8, 8), torch.float64)
    return {"x": x, "y": (10 * rng.uniform(rng.fold(k, "y"), rows)).to(torch.int64)}


@given(
    name=st.sampled_from(list(TASKS)),
    seed=st.integers(0, 10**6),
    real=st.integers(0, 4),
    padded=st.integers(1, 4),
    size=st.sampled_from([0.0, 1.0, 1e3, 1e6, -1e6]),
)
def test_garbage_in_padded_rows_changes_nothing(name, seed, real, padded, size):
    task = TASKS[name]
    engine = EngineOps(task.objectives, {})
    z = T.map(lambda v: v.double() + 0.1, task.init(seed % 7))
    data, junk = task_batch(seed, real + padded), task_batch(seed + 1, real + padded)
    row = torch.arange(real + padded)
    weight = (row < real).to(torch.float64)
    x = torch.where(row[:, None, None, None] < real, data["x"], size * junk["x"])
    dirty = Batch({"x": x, "y": torch.where(row < real, data["y"], junk["y"])}, weight)
    clean = Batch(data, weight)
    expected, told = engine.grad("train", z, clean, KEY)
    for found, aux in (
        engine.grad("train", z, dirty, KEY),
        T.index(torch.func.vmap(lambda w: engine.grad("train", z, Batch(dirty.data, w), KEY))(weight[None]), 0),
    ):
        assert_trees_close(found, expected, rtol=1e-9, atol=1e-12)
        assert_close(aux["loss"], told["loss"])
    if real:
        cut = Batch({k: v[:real] for k, v in data.items()}, weight[:real])
        assert_trees_close(expected, engine.grad("train", z, cut, KEY)[0], rtol=1e-9, atol=1e-12)
    elif name == "classification":
        assert float(T.norm(expected)) == 0


def test_a_batch_mean_ignores_garbage_losses_of_padded_rows():
    batch = batch_of(real=3)
    for garbage in (float("nan"), float("inf"), 1e30):
        losses = torch.tensor([1.0, 2.0, 6.0, garbage, garbage], dtype=torch.float64, requires_grad=True)
        mean = batch.mean(losses)
        assert mean.item() == 3.0
        torch.testing.assert_close(torch.autograd.grad(mean, losses)[0], batch.weight / 3)
        assert batch_of(real=0).mean(losses).item() == 0.0


def test_rows_of_other_clients_never_reach_a_padded_batch(federation, inner):
    # A NaN in a padded row would leak into gradients (0 * NaN); padding therefore repeats a row of the client itself.
    clients = [0, 3, 4]
    population = federation.population
    spans = zip(population.offsets, population.offsets[1:], strict=False)
    mine = torch.cat([population.indices[a:b] for c, (a, b) in enumerate(spans) if c in clients])
    x = torch.full_like(population.data["x"], float("nan"))
    x[mine] = population.data["x"][mine]
    poisoned = federation.with_(population=replace(population, data={**population.data, "x": x}))
    expected = T.leaves(federation.run(inner, clients).partials["z"].blocks)
    found = T.leaves(poisoned.run(inner, clients).partials["z"].blocks)
    assert all(map(torch.equal, found, expected))


def test_an_objective_that_the_task_does_not_have():
    ops = EngineOps(OBJECTIVES, {"predict": lambda z, batch: batch.x})
    with pytest.raises(ValueError, match=rf"^the task has no objective 'tarin', only {', '.join(OBJECTIVES)}$") as e:
        ops.grad("tarin", point(), batch_of(), KEY)
    assert e.value.__context__ is None
    with pytest.raises(ValueError, match=r"^the task has no function 'predic', only predict$"):
        ops.apply("predic", point(), batch_of())
