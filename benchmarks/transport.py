"""Round trip of a model to two actors: ``python -m benchmarks.transport --case mlp``.

Three ways take turns: fedfleet's own (pipes, and memory that the driver and its actors share), Ray's compiled graphs
over their channels, and Ray's calls with the model in its object store. Actors answer with a copy of the model.
``--busy`` keeps as many other processes at work as there are CPUs. At the end an actor stands still for a while, and
then it is killed. The first two ways have to answer again after both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import torch

from benchmarks import command, turns, world
from benchmarks.cases import CASES
from benchmarks.command import say
from benchmarks.overhead import echo
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.work import Message

ACTORS = 2
ANSWERED = "answered"
FREEZE_S = 12.0  # longer than a compiled graph waits for an answer where nothing is said
OURS, GRAPH, CALLS = "pipes and shared memory", "compiled graph", "calls"


class Plain:
    """An actor of Ray's, without anything of ours."""

    def echo(self, z: Tree) -> Tree:
        """Answer with the model."""
        return T.map(torch.clone, z)

    def pid(self) -> int:
        """Return the process."""
        return os.getpid()


def actors(number: int) -> list[Any]:
    """Start plain actors."""
    import ray

    start: Any = ray.remote(num_cpus=0)(Plain)
    made = [start.remote() for _ in range(number)]
    ray.get([a.pid.remote() for a in made])
    return made


def graph(of: list[Any], size: int) -> Any:
    """Compile the graph in which each of the actors answers what is given."""
    from ray.dag import InputNode, MultiOutputNode

    with InputNode() as given:
        answers = MultiOutputNode([a.echo.bind(given) for a in of])
    return answers.experimental_compile(_buffer_size_bytes=2 * size + 1_000_000)


def _timed(action: Callable[[], object]) -> Iterator[float]:
    while True:
        started = time.perf_counter()
        action()
        yield time.perf_counter() - started


def pid(setup: Setup, shared: Message, task: int) -> int:
    """Answer with the process."""
    return os.getpid()


def _came(answers: Callable[[], object]) -> str:
    """Ask for an answer, and return what comes of it: that there is one, or the kind of error."""
    try:
        answers()
    except Exception as e:
        return type(e).__name__
    return ANSWERED


def _after_death(process: int, answers: Callable[[], object], again: Callable[[], object]) -> dict[str, Any]:
    """Kill an actor; return what then comes of an answer, and the seconds until there are answers again."""
    os.kill(process, signal.SIGKILL)
    started = time.perf_counter()
    came = _came(answers)
    if came != ANSWERED:
        again()
    return {"came": came, "again_s": time.perf_counter() - started}


def _after_freeze(process: int, answers: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Let an actor stand still for so long; return what comes of an answer asked for meanwhile, and the seconds until it comes."""
    os.kill(process, signal.SIGSTOP)
    thaw = threading.Timer(seconds, os.kill, (process, signal.SIGCONT))
    thaw.start()
    started = time.perf_counter()
    came = _came(answers)
    took = time.perf_counter() - started
    thaw.join()
    return {"came": came, "seconds": took}


def measure(case: Any, number: int, freeze_s: float = FREEZE_S) -> dict[str, Any]:
    """Return milliseconds a model there and back, medians, over those of the first way; what comes of a freeze and of a death."""
    import ray

    from benchmarks.engine import executor

    ready = world.build(case)
    z = ready.task.init(case.seed)
    with ExitStack() as stack:
        ours = stack.enter_context(closing(executor("ray", ACTORS)))
        ours.start(world.setup(ready, world.rule(ready).inner))
        called, bound = actors(ACTORS), actors(ACTORS)
        (process,) = ray.get([bound[0].pid.remote()])
        compiled = graph(bound, T.num_bytes(z))

        def by_call() -> None:
            ray.get([a.echo.remote(there) for there in [ray.put(z)] for a in called])

        ways: dict[str, Callable[[], object]] = {
            OURS: lambda: list(ours.map(echo, Message(send={"z": z}), range(ACTORS))),
            GRAPH: lambda: ray.get(compiled.execute(z)),
            CALLS: by_call,
        }
        found = turns.taken({name: _timed(way) for name, way in ways.items()}, case, number, OURS, list(ways)[1:])
        first = next(iter(ours.map(pid, Message(), range(ACTORS))))
        frozen = {
            OURS: _after_freeze(first, ways[OURS], freeze_s),
            GRAPH: _after_freeze(process, ways[GRAPH], freeze_s),
        }
        if frozen[GRAPH]["came"] != ANSWERED:  # what came too late would be taken for the next answer
            compiled.teardown()
            compiled = graph(bound, T.num_bytes(z))
        after = {OURS: _after_death(first, ways[OURS], ways[OURS])}

        def compiled_anew() -> None:
            compiled.teardown()
            whole = graph([*actors(1), *bound[1:]], T.num_bytes(z))
            ray.get(whole.execute(z))
            whole.teardown()

        after[GRAPH] = _after_death(process, ways[GRAPH], compiled_anew)
    return {"megabytes": T.num_bytes(z) / 1e6, **found, "frozen": frozen, "after_a_death": after}


def _busy(stack: ExitStack) -> None:
    """Let as many other processes as there are CPUs compute until the end."""
    for _ in range(os.cpu_count() or 1):
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(process.wait)
        stack.callback(process.kill)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.transport", __doc__)
    ask.add_argument("--case", choices=CASES, default="mlp", help="whose model (default %(default)s)")
    ask.add_argument("--turns", type=command.count, default=200, help="of each (default %(default)d)")
    ask.add_argument("--busy", action="store_true", help="beside as many other processes at work as there are CPUs")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    say(f"{args.case}: {args.turns} turns")
    with ExitStack() as stack:
        if args.busy:
            _busy(stack)
        found = measure(CASES[args.case], args.turns)
    if args.json:
        print(json.dumps({"machine": command.machine(), **found}))
        return
    print(f"{args.case}, {found['megabytes']:.2f} MB to {ACTORS} actors and back")
    for name, ms in found["ms"].items():
        over = found["over"].get(name)
        death = found["after_a_death"].get(name)
        frozen = found["frozen"].get(name)
        told = (
            f"; an actor still for {FREEZE_S:.0f} s: {frozen['came']} after {frozen['seconds']:.1f} s" if frozen else ""
        )
        told += f"; an actor killed: {death['came']}, answers again after {death['again_s']:.2f} s" if death else ""
        print(f"{name:24} {ms:8.3f} ms{turns.times(over)}{told}")


if __name__ == "__main__":
    main()
