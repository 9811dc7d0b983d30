"""Measure models client by client: the global one, and each client's own, on the client's own examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Personal
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.reduction import CollectUploads, merge
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import run_block
from fedfleet.simulator.block.faults import Faults
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.driver.evaluation import CHUNK, TENTH, less_is_better
from fedfleet.simulator.driver.state import ClientStore
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.work import Batch, BatchPlan, LocalLoop, LocalWork, Message, Ops, Phase, StepFn, StepInfo

NAME, GLOBAL, OWN = "client_metrics", "global", "own_"
WEIGHT = "weight"
"""What "per_example" may give besides metrics: how much an example counts in its client's means, such as a text's tokens."""
CLIENTS_A_BLOCK = 32


class _Measured(NamedTuple):
    """A client in the middle: its own model under way, what it keeps, examples seen, what they weigh, weighted sums of metrics."""

    carry: Tree
    client_state: Tree
    rows: Tensor
    weight: Tensor
    totals: dict[str, Tensor]


def client_metrics(metrics: tuple[str, ...], personal: Personal | None) -> tuple[str, ...]:
    """Return what is measured of each client: the task's metrics, and those of its own model, where one comes about."""
    return metrics if personal is None else (*metrics, *(f"{OWN}{name}" for name in metrics))


def client_phase(metrics: tuple[str, ...], *, held_out: bool, personal: Personal | None) -> Phase:
    """Return the phase that averages the task's "per_example" metrics over each client's own data, or what is held out of it.

    Those of the client's own model, where one comes about, are called "own_<metric>".
    """
    whose = client_metrics(metrics, personal)

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> _Measured:
        zero = torch.zeros((), device=key.device)
        carry = None if personal is None else personal.work.client_init(shared, client_state, client_input, key)
        return _Measured(carry, client_state, zero, zero, dict.fromkeys(whose, zero))

    def lifted(step: StepFn) -> StepFn:
        return lambda ops, shared, at_work, batch, at, key: at_work._replace(
            carry=step(ops, shared, at_work.carry, batch, at, key)
        )

    def measure(
        ops: Ops, shared: Mapping[str, Any], at_work: _Measured, batch: Batch, at: StepInfo, key: Key
    ) -> _Measured:
        each = ops.apply("per_example", shared[GLOBAL], batch)
        result = {name: each[name] for name in metrics}
        if personal is not None:
            z = personal.work.client_final(shared, at_work.client_state, None, at_work.carry)[0].send["z"]
            mine = ops.apply(personal.function, z, batch)
            result |= {f"{OWN}{name}": mine[name] for name in metrics}
        rows, weight = batch.count(), each.get(WEIGHT)
        total = lambda v: rows * batch.mean(v if weight is None else weight * v)  # noqa: E731
        totals = {name: at_work.totals[name] + total(result[name]) for name in whose}
        weighs = rows if weight is None else total(torch.ones_like(weight))
        return _Measured(at_work.carry, at_work.client_state, at_work.rows + rows, at_work.weight + weighs, totals)

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, at_work: _Measured
    ) -> tuple[Message, Tree]:
        means = {name: total / at_work.weight for name, total in at_work.totals.items()}
        return Message(send={"metrics": means, "examples": at_work.rows}), client_state

    everything = BatchPlan(size=CHUNK, epochs=1, shuffle=False, held_out=held_out)
    before = () if personal is None else personal.work.loops
    stages = (
        *(LocalLoop(step=lifted(s.step), batches=s.batches) for s in before),
        LocalLoop(step=measure, batches=everything),
    )
    return Phase(
        name=NAME,
        work=LocalWork(client_init=client_init, loops=stages, client_final=client_final),
        reduce={"metrics": CollectUploads(), "examples": CollectUploads()},
        client_state=None if personal is None else personal.client_state,
    )


class ClientMetrics(NamedTuple):
    """Of each client: the number of examples it was measured on (N,), and its metrics (N,), finite or not."""

    examples: Tensor
    found: dict[str, Tensor]

    @property
    def named(self) -> dict[str, Tensor]:
        """The metrics (N,) as they are called beside others: those of the global model "clients_<metric>"."""
        return {name if name.startswith(OWN) else f"clients_{name}": each for name, each in self.found.items()}

    def by_domain(self, domain: Tensor) -> dict[str, Tensor]:
        """Return the metrics (p,) float64, averaged over the examples of the clients of each domain; none where there is one."""
        if not domain.any():
            return {}
        total = torch.zeros(int(domain.max()) + 1, dtype=torch.float64).index_add_(0, domain, self.examples.double())
        return {
            name: torch.zeros_like(total).index_add_(0, domain, each.double() * self.examples) / total
            for name, each in self.named.items()
        }

    def summary(self) -> dict[str, float]:
        """Return of each metric the mean over all clients' examples, the standard deviation over clients, and the worst tenth."""
        told = {}
        for name, each in self.named.items():
            value, bad = each.double(), less_is_better(name)
            told[name] = float((value * self.examples).sum() / self.examples.sum())
            told[f"{name}_std"] = float(value.std(correction=0))
            worst = (value.nan_to_num(torch.inf, torch.inf) if bad else value).sort(descending=bad).values
            told[f"{name}_worst_tenth"] = float(worst[: max(1, len(worst) // TENTH)].mean())
        return told


def evaluate_clients(
    executor: Executor,
    z: Tree,
    clients: int,
    *,
    seed: int = 0,
    message: Message | None = None,
    client_state: Callable[[Tensor], Tree] | None = None,
) -> ClientMetrics:
    """Return every client's metrics at ``z``; the setup must hold ``client_phase``.

    Args:
        executor: where.
        z: the global model.
        clients: their number, N.
        seed: of what clients draw on the way to their own models.
        message: what these are made of, if there are such.
        client_state: what clients (C,) keep, stacked.

    """
    key, faults = rng.fold(rng.key(seed), "own model"), Faults(non_finite="keep")
    tasks = (  # made as they are needed: of what clients keep no more is in memory than is at work
        BlockTask(
            NAME,
            c,
            torch.zeros_like(c),
            key,
            client_state=None if client_state is None else client_state(c),
            faults=faults,
        )
        for c in torch.arange(clients).split(CLIENTS_A_BLOCK)
    )
    sent = Message() if message is None else message
    partials: dict[str, Any] = {"metrics": None, "examples": None}
    for result in executor.map(run_block, Message({GLOBAL: z, **sent.send}, sent.config, sent.known), tasks):
        partials = {slot: merge(CollectUploads(), partials[slot], result.partials[slot]) for slot in partials}
    found, examples = (partials[slot].stacked() for slot in partials)
    return ClientMetrics(examples, found)


def states(store: ClientStore, personal: Personal, message: Message) -> Callable[[Tensor], Tree] | None:
    """Return what looks up the clients' states; None where they keep nothing."""
    fresh = personal.client_state
    return None if fresh is None else lambda clients: store.get(clients, lambda: fresh(message.merged()))
