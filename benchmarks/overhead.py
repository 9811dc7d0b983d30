"""Overhead of a phase whose clients do nothing: messages, dispatch, results, merging, bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from statistics import median
from typing import Any

import torch

from benchmarks.world import How, World, play
from fedfleet.simulator.algorithm import Algorithm, Round, View
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Total
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.work import BatchPlan, LocalLoop, LocalWork, Message, Phase

REPEATS = 30
PHASES = 150


def nothing(setup: Setup, shared: Message, task: int) -> int:
    """Answer at once."""
    return task


def echo(setup: Setup, shared: Message, task: int) -> Tree:
    """Answer with the model."""
    return T.map(torch.clone, shared.send["z"])


def idle(cohort: int) -> Algorithm:
    """Return an algorithm whose clients receive the model, look at one example, and send one number."""
    look = LocalLoop(step=lambda ops, shared, carry, batch, at, key: carry, batches=BatchPlan(size=1, steps=1))
    work = LocalWork(
        client_init=lambda shared, client_state, client_input, key: None,
        loops=(look,),
        client_final=lambda shared, client_state, client_input, carry: (Message(send={"n": torch.ones(())}), None),
    )
    phase = Phase(name="idle", work=work, reduce={"n": Total()})

    def round(z: Tree, rnd: Round) -> tuple[Tree, dict[str, float]]:
        rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=rnd.invite(cohort))
        return z, {}

    return Algorithm(lambda z, key, problem: z, round, (phase,), {"global": View(lambda z: z)})


def measure(world: World, executor: Executor, how: How) -> dict[str, Any]:
    """Return medians in milliseconds: a whole phase, a bare map, a map that brings back and adds a model a block.

    Of a phase, ``draws_ms`` go by while it is found out who is invited and who answers, and ``driver_ms`` are what the driver's
    thread computes, draws among them; in the rest it waits. The executor has been started for ``world`` and stays so for the
    maps; the phases start it anew.
    """
    blocks = -(-world.case.cohort // how.block_size)
    shared = Message(send={"z": world.task.init(0)})
    found = {
        "blocks": blocks,
        "map_ms": _milliseconds(lambda: list(executor.map(nothing, Message(), range(blocks)))),
        "map_model_ms": _milliseconds(lambda: reduce(T.add, executor.map(echo, shared, range(blocks)))),
    }
    executor.close()
    phases, computed = [], []
    playing = play(replace(world, algorithm=idle(world.case.cohort)), executor, how, PHASES)
    while True:
        started = time.thread_time()
        record = next(playing, None)
        if record is None:
            break
        phases.append(record)
        computed.append(time.thread_time() - started)
    settled = slice(PHASES // 3, None)
    return found | {
        "phase_ms": 1000 * median(r.seconds for r in phases[settled]),
        "draws_ms": 1000 * median(r.sampling_s for r in phases[settled]),
        "driver_ms": 1000 * median(computed[settled]),
    }


def _milliseconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return 1000 * median(times[3:])
