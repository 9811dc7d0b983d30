"""A case in JAX, run by its own interpreter: ``jax_loop.py JOB``. One ``jit`` a round, as users of FedJAX or DrJAX have it.

Clients are mapped by ``vmap`` or one after the other by ``lax.map``, whichever is faster for the case. It is one process, and
XLA has as many threads as it likes.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
import workload
from torch import nn

TRIED = 3  # rounds of each way, after the one that compiles it


def of_net(net: nn.Module) -> tuple[list[Any], Callable[[list[Any], Any], Any]]:
    """Return a net's parameters, and the function of them and a batch that it is."""
    layers = list(net) if isinstance(net, nn.Sequential) else [net]
    params = [[jnp.asarray(p.detach().numpy()) for p in layer.parameters()] for layer in layers]

    def forward(params: list[Any], x: Any) -> Any:
        for layer, p in zip(layers, params, strict=True):
            x = _layer(layer, p, x)
        return x

    return params, forward


def _layer(layer: nn.Module, params: list[Any], x: Any) -> Any:
    if isinstance(layer, nn.Linear):
        return x @ params[0].T + params[1]
    if isinstance(layer, nn.Conv2d):
        padding = [(int(p), int(p)) for p in layer.padding]
        axes = ("NCHW", "OIHW", "NCHW")
        found = jax.lax.conv_general_dilated(x, params[0], (1, 1), padding, dimension_numbers=axes)
        return found + params[1][None, :, None, None]
    if isinstance(layer, nn.MaxPool2d):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    if isinstance(layer, nn.Flatten):
        return x.reshape(x.shape[0], -1)
    if isinstance(layer, nn.ReLU):
        return jax.nn.relu(x)
    raise ValueError(f"no {type(layer).__name__} here")


def compiled(case: workload.Case, way: str) -> tuple[list[Any], Callable[..., Any]]:
    """Return the first model and a round: (model, x (S, n, ...), y (S, n)) -> model. ``way`` is "vmap" or "map"."""
    first, forward = of_net(workload.net(case))

    def loss(params: Any, x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(forward(params, x)), y[:, None], 1).mean()

    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - case.lr * g, params, grads), None

    def client(params: Any, x: Any, y: Any) -> Any:
        batches = tuple(v.reshape(-1, case.batch, *v.shape[1:]) for v in (x, y))
        again = tuple(jnp.concatenate([v] * case.epochs) for v in batches)
        return jax.tree.map(jnp.subtract, jax.lax.scan(step, params, again)[0], params)

    def all_clients(params: Any, x: Any, y: Any) -> Any:
        if way == "vmap":
            return jax.vmap(client, (None, 0, 0))(params, x, y)
        return jax.lax.map(lambda of: client(params, *of), (x, y))

    @jax.jit
    def round(params: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda p, moved: p + moved.mean(0), params, all_clients(params, x, y))

    return first, round


def rounds(case: workload.Case, way: str, count: int) -> Iterator[tuple[list[Any], float]]:
    """Yield the model after each round, and the seconds it took."""
    x, y = (v.numpy() for v in workload.data(case))
    params, round = compiled(case, way)
    for r in range(count):
        started = time.perf_counter()
        ids = workload.cohort(case, r)
        params = jax.block_until_ready(round(params, x[ids], y[ids]))
        yield params, time.perf_counter() - started


def faster(case: workload.Case) -> str:
    """Return the way that takes less time a round."""
    return min(("vmap", "map"), key=lambda way: min([s for _, s in rounds(case, way, 1 + TRIED)][1:]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = workload.asked()
    way = faster(job.case)
    seconds = [s for _, s in rounds(job.case, way, job.warmup + job.rounds)]
    workload.answer(seconds, job, f"jax {jax.__version__}, {way}")
