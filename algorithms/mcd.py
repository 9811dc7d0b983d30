"""MCD: maximum classifier discrepancy, what FACT becomes in one place: two heads are driven apart on target examples.

Saito, Watanabe, Ushiku & Harada, "Maximum classifier discrepancy for unsupervised domain adaptation", CVPR 2018, section 3.3.
With one client that holds labelled and unlabelled examples it is centralised; with more, their models are averaged.

    paper                   here
    G, F_1, F_2             "x", "head", "second"
    step A                  "train", all three: cross-entropy of both heads on labelled rows
    step B                  "discord", both heads: the same minus the discrepancy on unlabelled rows
    step C, n times         "idd", G: that discrepancy; n is generator_steps

Every step takes the same minibatch, which holds labelled and unlabelled rows in proportion. G and the heads have optimisers of
their own, which clients keep between rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import Field

from fedfleet.algorithms.options import ClientOptimizer, CohortOptions, LocalOptions
from fedfleet.simulator.author import (
    BUFFERS,
    Algorithm,
    Batch,
    BatchPlan,
    Key,
    LocalLoop,
    LocalWork,
    Mean,
    Message,
    Ops,
    Phase,
    Problem,
    Round,
    StepInfo,
    T,
    Task,
    Tree,
    View,
    rng,
)

GENERATOR, HEADS = ("x",), ("head", "second")


class McdOptions(LocalOptions):
    """Options of MCD."""

    optimizer: ClientOptimizer = ClientOptimizer()
    """Of G, and of the heads, each its own."""
    generator_steps: int = Field(default=4, ge=1)
    """Steps C a minibatch, n."""


class Local(NamedTuple):
    """A client in the middle of its steps: the model, and the optimisers' states, of G and of the heads."""

    z: Tree
    of_generator: Any
    of_heads: Any


def mcd(options: McdOptions, task: Task, cohort: CohortOptions) -> Algorithm:
    """Build MCD."""
    plan = BatchPlan(size=options.batch_size, steps=options.steps, epochs=options.epochs, stratified="proportional")
    return driven_apart(options, task, cohort, plan)


def driven_apart(
    options: McdOptions,
    task: Task,
    cohort: CohortOptions,
    plan: BatchPlan,
    first: str = "train",
    ctx: Callable[[Key], Tree] = lambda key: None,
) -> Algorithm:
    """Build MCD with an objective of its own for step A.

    Args:
        options: of the steps.
        task: the task.
        cohort: who is invited.
        plan: the minibatches.
        first: the objective of step A.
        ctx: what that is told, made on the device of a key.

    """
    rule = options.optimizer.build()
    remembers = rule.remembers

    def some(z: Tree, parts: tuple[str, ...]) -> Tree:
        return {p: z[p] for p in parts}

    def fresh(shared: Mapping[str, Any]) -> Tree:
        return {"x": rule.init(some(shared["z"], GENERATOR)), "heads": rule.init(some(shared["z"], HEADS))}

    def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Local:
        state = client_state if remembers else fresh(shared)
        return Local(shared["z"], state["x"], state["heads"])

    def moved(
        ops: Ops, name: str, lr: Any, local: Local, batch: Batch, key: Key, parts: tuple[str, ...], told: Tree = None
    ) -> Local:
        """Take a step of some parts along an objective's direction."""
        d, _ = ops.grad(name, local.z, batch, key, wrt=parts, ctx=told)
        steps, states = {}, [local.of_generator, local.of_heads]
        for i, mine in enumerate((GENERATOR, HEADS)):
            if set(mine) <= set(parts):
                result, states[i] = rule.update(states[i], some(d, mine), some(local.z, mine))
                steps |= result
        still = (BUFFERS,) if BUFFERS in local.z else ()
        z = ops.step(name, some(local.z, (*parts, *still)), lr, steps | some(d, still))
        return Local({**local.z, **z}, *states)

    def step(ops: Ops, shared: Mapping[str, Any], local: Local, batch: Batch, at: StepInfo, key: Key) -> Local:
        lr = shared["lr"]
        local = moved(ops, first, lr, local, batch, rng.fold(key, "A"), GENERATOR + HEADS, ctx(key))
        local = moved(ops, "discord", lr, local, batch, rng.fold(key, "B"), HEADS)
        for i in range(options.generator_steps):
            local = moved(ops, "idd", lr, local, batch, rng.fold(key, "C", i), GENERATOR)
        return local

    def client_final(
        shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Local
    ) -> tuple[Message, Tree]:
        state = {"x": local.of_generator, "heads": local.of_heads}
        return Message({"z": local.z}), state if remembers else client_state

    work = LocalWork(client_init=client_init, loops=(LocalLoop(step=step, batches=plan),), client_final=client_final)
    train = Phase(
        name="train", work=work, reduce={"z": Mean()}, weight="num_examples", client_state=fresh if remembers else None
    )

    def init(z: Tree, key: Key, problem: Problem) -> Tree:
        """Return the model with a second head, drawn as the first is."""
        other = task.init(int(rng.bits(rng.fold(key, "second"))) % 2**31)["head"]
        result = {"x": z["x"], "head": z["head"], "second": T.map(lambda v, like: v.to(like.dtype), other, z["head"])}
        if BUFFERS not in z:
            return result
        seen = {n: v for n, v in z[BUFFERS].items() if n.startswith("head.")}
        return {**result, BUFFERS: z[BUFFERS] | {f"second.{n.removeprefix('head.')}": v for n, v in seen.items()}}

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        lr = options.rates(rnd.index, GENERATOR)["x"]
        shared = Message({"z": z}, {"lr": lr})
        return rnd.map_reduce(train, shared=shared, cohort=rnd.invite(cohort.size))["z"], {}

    return Algorithm(
        init,
        round,
        (train,),
        {"global": View(lambda z: z)},
        requires=("x", "head"),
        minimises=True,
        roles=True,
        buffers=True,
    )
