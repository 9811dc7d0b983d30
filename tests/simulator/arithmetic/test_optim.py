from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.optim import Optimizer, adagrad, adam, adaptive, sgd

STEPS = 10
LR = 0.1


def start(seed: int = 0) -> dict:
    k = rng.key(seed)
    return {
        "x": {"w": rng.normal(rng.fold(k, "w"), (4, 3), torch.float64), "s": rng.normal(k, (), torch.float64)},
        "y": (rng.normal(rng.fold(k, "y"), 2, torch.float64), None),
    }


def directions(seed: int = 1) -> list:
    """Gradients of changing scale, with exact zeros among them."""
    k = rng.key(seed)
    found = []
    for t in range(STEPS):
        g = start(int(rng.fold(k, t)))
        g["x"]["w"][t % 4] = 0.0
        found.append(T.scale(10.0 ** (t % 3 - 1), g))
    return found


def ours(optimizer: Optimizer, z: dict, found: list) -> list:
    state, points = optimizer.init(z), []
    for g in found:
        d, state = optimizer.update(state, g, z)
        z = T.axpy(-LR, d, z)
        points.append(z)
    return points


def theirs(make, z: dict, found: list, clip_norm: float | None = None) -> list:
    params = [leaf.clone().requires_grad_() for leaf in T.leaves(z)]
    optimizer, points = make(params), []
    for g in found:
        for p, leaf in zip(params, T.leaves(g), strict=True):
            p.grad = leaf.clone()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, clip_norm)
        optimizer.step()
        points.append(T.unflatten(z, [p.detach().clone() for p in params]))
    return points


def assert_same_path(a: list, b: list, **tolerance: float) -> None:
    for x, y in zip(a, b, strict=True):
        for u, v in zip(T.leaves(x), T.leaves(y), strict=True):
            assert_close(u, v, **tolerance)


SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
]
ADAM = [{}, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}, {"weight_decay": 0.1}, {"beta1": 0.0}]


def torch_adam(params, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, of=torch.optim.Adam):
    return of(params, lr=LR, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)


OF_TORCH = [
    *((sgd, lambda p, **o: torch.optim.SGD(p, lr=LR, **o), options) for options in SGD),
    *((adam, torch_adam, options) for options in ADAM),
    (partial(adam, decoupled=True), partial(torch_adam, of=torch.optim.AdamW), {"weight_decay": 0.3, "beta2": 0.9}),
    *((adagrad, lambda p, **o: torch.optim.Adagrad(p, lr=LR, **o), o) for o in ({}, {"eps": 0.1, "weight_decay": 0.2})),
]


def test_rules_are_those_of_torch(subtests):
    for rule, make, options in OF_TORCH:
        for clip in (None, 0.5) if rule is not adagrad else (None,):
            with subtests.test(f"{rule} {options}, clipped to {clip}"):
                expected = theirs(lambda p, make=make, o=options: make(p, **o), start(), directions(), clip)
                made = rule(**options) if clip is None else rule(**options, clip_norm=clip)
                assert_same_path(ours(made, start(), directions()), expected)


def test_single_precision_stays_single():
    z = T.map(lambda v: v.float(), start())
    found = [T.map(lambda v: v.float(), g) for g in directions()]
    for optimizer, reference in ((sgd(momentum=0.9), None), (adam(), torch_adam)):
        points = ours(optimizer, z, found)
        assert {leaf.dtype for leaf in T.leaves(tuple(points))} == {torch.float32}
        if reference is not None:
            assert_same_path(points, theirs(reference, z, found), rtol=1e-4, atol=1e-5)


def test_clipping_shortens_to_the_norm_and_leaves_short_directions_alone():
    z, long = start(), T.scale(100.0, start(5))
    clipped, _ = sgd(clip_norm=2.0).update(None, long, z)
    assert float(T.norm(clipped)) == pytest.approx(2.0, rel=1e-6)
    assert float(T.dot(clipped, long)) == pytest.approx(2.0 * float(T.norm(long)), rel=1e-6)
    short = T.scale(0.01, start(5))
    unchanged, _ = sgd(clip_norm=2.0).update(None, short, z)
    assert_same_path([unchanged], [short], rtol=0, atol=0)
    nothing, _ = sgd(clip_norm=2.0).update(None, T.zeros_like(z), z)
    assert float(T.norm(nothing)) == 0


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_server_rules_are_algorithm_2_of_reddi_et_al(rule):
    beta1, beta2, tau, eta = 0.9, 0.95, 0.3, LR
    # x, Delta as in the paper; our direction is -Delta, so that x + eta * m / (sqrt(v) + tau) is a descent step.
    x = [leaf.numpy().copy() for leaf in T.leaves(start())]
    m, v = [np.zeros_like(a) for a in x], [np.full_like(a, tau**2) for a in x]
    expected = []
    for g in directions():
        for i, leaf in enumerate(T.leaves(g)):
            delta = -leaf.numpy()
            m[i] = beta1 * m[i] + (1 - beta1) * delta
            if rule == "adagrad":
                v[i] = v[i] + delta**2
            elif rule == "yogi":
                v[i] = v[i] - (1 - beta2) * delta**2 * np.sign(v[i] - delta**2)
            else:
                v[i] = beta2 * v[i] + (1 - beta2) * delta**2
            x[i] = x[i] + eta * m[i] / (np.sqrt(v[i]) + tau)
        expected.append(T.unflatten(start(), [torch.as_tensor(a).clone() for a in x]))
    optimizer = adaptive(rule, beta1=beta1, beta2=beta2, tau=tau)
    assert_same_path(ours(optimizer, start(), directions()), expected)


def test_stateless_sgd_returns_the_direction():
    d, state = sgd().update(sgd().init(start()), start(1), start())
    assert state is None
    assert_same_path([d], [start(1)], rtol=0, atol=0)


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(),
        sgd(momentum=0.9, nesterov=True, weight_decay=0.1, clip_norm=0.5),
        adam(weight_decay=0.1, clip_norm=0.5),
        adaptive("yogi"),
    ],
    ids=["sgd", "nesterov", "adam", "yogi"],
)
def test_inside_vmap_gives_the_same_as_outside(optimizer):
    clients = [(start(c), directions(10 + c)) for c in range(3)]
    alone = [T.leaves(ours(optimizer, z, found)[-1]) for z, found in clients]
    stacked = [
        T.stack([z for z, _ in clients]),
        *(T.stack(list(gs)) for gs in zip(*(f for _, f in clients), strict=True)),
    ]

    def program(*tensors):
        z, *found = T.unflatten(tuple(stacked), tensors)
        return tuple(T.leaves(ours(optimizer, z, found)[-1]))

    together = torch.func.vmap(program)(*T.leaves(tuple(stacked)))
    for column, rows in zip(together, zip(*alone, strict=True), strict=True):
        assert_close(column, torch.stack(rows))
