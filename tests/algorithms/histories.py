"""Runs of the table of cases, each made once a process: what ``test_contract.py`` reads its properties from."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fedfleet.algorithms.options import CohortOptions, Schedule
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.population import problem
from fedfleet.experiments.checkpoint import Checkpoints, newest
from fedfleet.simulator.algorithm import Algorithm
from fedfleet.simulator.arithmetic import layers
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Mean, Rows
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.side_effects import ClosureTensors
from fedfleet.simulator.driver import round as driver
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.server import initial
from fedfleet.simulator.driver.simulate import RoundRecord, play, start
from fedfleet.simulator.driver.state import ClientStore
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.availability import Bernoulli
from fedfleet.simulator.fleet.devices import Load, Times
from fedfleet.simulator.fleet.policies import Siwer, WaitAll
from fedfleet.simulator.fleet.responses import Federation
from tests.algorithms.cases import ASYNCHRONOUS, INVITE, MODEL, ROWS
from tests.algorithms.harness import NET, World, as_asked, build, digits, flat
from tests.simulator.device.nominal import on_device, placed

FALLING = Schedule(kind="step", every=1, factor=0.5)
RATES = ("lr", "dual_lr", "shift_lr")
"""Options that a schedule multiplies."""


@dataclass(frozen=True)
class How:
    """The way to run a case.

    An ``even`` world has 103 clients of 14 examples, so that all blocks are of one kind; else their sizes differ, some are not
    heard, rates fall by half each round, and some clients are heard again.
    """

    inner: str = "serial"
    even: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    block_size: int = 4
    captured: bool = False
    falls: bool = False
    """Rates fall in an even world too, a little each round, which has one block in each phase."""
    device: str = "cpu"
    resumed: bool = False
    by_hand: bool = False
    """Each round is one of another algorithm, without a schedule, whose rates are those that the schedule comes to."""
    model: str = ""
    fold_at: float = 1.0
    momentum: float | None = None
    """Clients take one step in each loop, with this momentum, which of an optimiser that starts afresh is nothing."""
    lasts: bool = False
    """Clients keep their optimiser's momentum of 0.9 from round to round."""


class History(NamedTuple):
    """A run: the initial model, and of each round the model, losses, counts and what devices were told of its phases.

    ``weights`` says by what clients count in its means: "examples", "alike" or numbers of their "own". ``told`` are the numbers
    that clients are told on the way to models of their own, of each round, ``kept`` what they keep in the end.
    """

    initial: Tensor
    models: list[Tensor]
    losses: list[list[float | None]]
    counts: list[list[dict[str, int]]]
    loads: list[Load]
    captures: int
    weights: set[str]
    told: list[list[float]]
    kept: Tensor


class Spy:
    """Devices that take no time, and remember what they were told."""

    def __init__(self) -> None:
        self.loads: list[Load] = []

    def times(self, key: Any, clients: Tensor, load: Load) -> Times:
        self.loads.append(load)
        none = torch.zeros(len(clients), dtype=torch.float64)
        return Times(none + 1, none)


def world(name: str, how: How) -> World:
    """Return the task of a case and its clients."""
    task = ROWS[name][0]
    net = {"model": MODEL[name]} if name in MODEL else NETS.get(task, {}).get(how.model) or NET
    if how.model and task not in NETS:
        net = {"model": how.model, "hidden": (8,)}
    clients: dict[str, Any] = {"partition": "quantity_skew", "clients": 20, "alpha": 1.0, "min_size": 2}
    clients = {"partition": "iid", "clients": 103} if how.even else clients
    return digits(task, net=net, dtype=how.dtype, scale=2 if how.model == "lenet" else 1, **clients)


NETS: dict[str, dict[str, dict[str, Any]]] = {
    "domain_adaptation": {
        "logistic": {"hidden": (), "loss": "mdd"},
        "lenet": {"model": "conv2", "loss": "cdan_e"},
    },
    "stochastic": {
        "logistic": {"model": "logistic", "latent": 5},
        "lenet": {"model": "lenet", "latent": 5},
    },
    "two_heads": {"logistic": {"hidden": (9,)}, "lenet": {"model": "digits_small"}},
}
"""What stands for a model where the task has nets of its own."""


def algorithm(name: str, where: World, how: How, t: int = 0) -> Algorithm:
    """Build the algorithm of a case, or of its round t."""
    options, kind = dict(ROWS[name][1]), name.partition(",")[0]
    if how.even:
        few = {"steps": min(2, options.get("steps", 2)), "decay": 0.0}
        options |= {key: value for key, value in few.items() if key in options}
        options |= {"lr_schedule": Schedule(kind="step", every=1, factor=0.97)} if how.falls else {}
    elif how.by_hand:
        known = ALGORITHMS[kind].options(**options)
        options |= {key: getattr(known, key) * FALLING.at(t) for key in RATES if getattr(known, key, None) is not None}
    elif "lr_schedule" in ALGORITHMS[kind].options.model_fields:
        options["lr_schedule"] = FALLING
    if how.momentum is not None:
        fields = ALGORITHMS[kind].options.model_fields
        options |= {key: 1 for key in ("steps", "own_steps", "head_steps") if key in fields}
        options |= {"client_optimizer": {"momentum": how.momentum}}
        options = {key: value for key, value in options.items() if not key.endswith("epochs")}
    if how.lasts:
        options["client_optimizer"] = {"momentum": how.momentum or 0.9, "state": "persist"}
    return build(kind, where.task, CohortOptions(size=INVITE.get(name, 12 if how.even else 8)), **options)


def rounds(name: str, how: How) -> int:
    """Return how many rounds show what there is to see: blocks of asynchronous ones are as large as versions have answers."""
    if name in ASYNCHRONOUS:
        return 8
    if how.seed:
        return 1
    if how.falls:
        return 5
    if how.even:
        return 5 if name in INVITE else 2
    return 2 if how.model else 3


@functools.cache
def history(name: str, how: How) -> History:
    """Run a case."""
    with ExitStack() as stack:
        if not how.even:  # all blocks are filled up with clients that count for nothing
            more = 2 if how.inner == "batched" else 1
            stack.enter_context(patch.object(driver, "bucket_sizes", lambda clients, most: (most + more,)))
        stack.enter_context(patch.object(layers, "FOLD_AT", how.fold_at))
        if how.device != "cpu":
            stack.enter_context(placed())
        weights = (
            stack.enter_context(weighed(world(name, how))) if how == How() else set()
        )  # captured blocks tell nothing
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return _run(name, how, folder)._replace(weights=weights)


def _run(name: str, how: How, folder: Path) -> History:
    where, spy, captures = world(name, how), Spy(), Captures(after=1 if how.captured else None)
    made = algorithm(name, where, how)
    where = as_asked(made, where)
    z = T.map(lambda x: x.to(how.dtype) if x.is_floating_point() else x, where.task.init(how.seed))
    held = ClosureTensors(tries=how == How("factored"))
    common: Any = {"captures": captures, "held": held, "device": how.device}
    turns = [algorithm(name, where, how, t) for t in range(rounds(name, how))] if how.by_hand else [made]
    setups = [Setup.of(turn, where.task, where.population, how.inner, **common) for turn in turns]
    away = Federation(policy=WaitAll()) if how.even else Federation(policy=Siwer(), availability=Bernoulli(0.9))
    conditions = Conditions(
        seed=how.seed,
        block_size=how.block_size,
        federation=replace(away, devices=spy),
        device=None if how.device == "cpu" else torch.device(how.device),
    )
    view = made.views["global"].params
    found = History(
        flat(made.views["global"].params(initial(made, z, how.seed, problem(where.population)))),
        [],
        [],
        [],
        spy.loads,
        0,
        set(),
        [],
        torch.zeros(0),
    )
    series = list(itertools.islice(itertools.cycle(zip(turns, setups, strict=True)), rounds(name, how)))
    kept = torch.zeros(0)
    for (turn, _), (record, store) in zip(
        series, _records(series, z, where, conditions, folder if how.resumed else None), strict=True
    ):
        assert not any(on_device(t) for t in T.leaves(record.state) if isinstance(t, Tensor))
        found.models.append(flat(view(record.state)))
        found.losses.append([p.train_loss for p in record.phases])
        found.counts.append([dict(p.counts) for p in record.phases])
        if turn.personal is not None:
            config = turn.personal.message(record.state, record.index).config
            found.told.append([float(v) for v in T.leaves(dict(config))])
        kept = _kept(store)
    return found._replace(captures=captures.ready, kept=kept)


def _kept(store: ClientStore) -> Tensor:
    """Return what clients keep, in the order of their numbers."""
    clients = sorted(store._at)
    states = store.get(torch.tensor(clients), lambda: None) if clients else {}
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(leaf.flatten().double() for leaf in T.leaves(states))])


@contextmanager
def weighed(where: World) -> Iterator[set[str]]:
    """Note by what clients count in means: by their examples, alike, or by numbers of their own."""
    sizes, seen, block = set(where.population.offsets.diff().tolist()), set[str](), Mean.block

    def noted(self: Mean, values: Any, rows: Rows) -> Any:
        weight = (rows.weight if self.weighted else rows.unit)[rows.unit > 0]
        if len(weight):
            alike, whole = bool((weight == weight[0]).all()), sizes.issuperset(weight.tolist())
            seen.add("examples" if whole else "alike" if alike else "own")
        return block(self, values, rows)

    with patch.object(Mean, "block", noted):
        yield seen


def _records(
    series: list[tuple[Algorithm, Setup]], z: Any, where: World, conditions: Conditions, folder: Path | None
) -> Iterator[tuple[RoundRecord, ClientStore]]:
    """Play rounds, and yield clients' states with each; with a folder, go on from a checkpoint after each."""
    people = problem(where.population)
    checkpoints = None if folder is None else Checkpoints(folder, 1)
    executor, at, begun = (
        LocalExecutor(1),
        start(series[0][0], z, people, conditions, checkpoints and checkpoints.states),
        None,
    )
    try:
        for made, setup in series:
            if setup is not begun:
                executor.start(setup)
                begun = setup
            record = play(made, at, people, conditions, executor)
            at.accept(record)
            yield record, at.memory.store
            if checkpoints is not None:
                checkpoints.write(at, {})
                found = newest(checkpoints.folder)[0]
                assert found is not None
                at = start(made, z, people, conditions, checkpoints.states)
                checkpoints.restore(found, at)
    finally:
        executor.close()
