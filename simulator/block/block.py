"""Run the work of one block of clients: one at a time (``serial``, the reference) or all at once (``batched``, ``factored``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.ambient import EXACT, Gpu
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.combination import multiplied_out
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.reduction import Rows
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.batches import BatchSchedule, ends, walked
from fedfleet.simulator.block.capture import Captures
from fedfleet.simulator.block.client import ClientInputs, ClientProgram, padded
from fedfleet.simulator.block.faults import LOWER, AtFault, Dropped, NotFinite, Watch, finite, not_finite
from fedfleet.simulator.block.side_effects import KEYS, ClosureTensors, Impure, SideEffects
from fedfleet.simulator.block.task import BlockResult, BlockTask, joined, without
from fedfleet.simulator.block.uploads import put_down
from fedfleet.simulator.errors import INEXACT, ClientError, one_line, traced
from fedfleet.simulator.population import LocalData, Population, gather
from fedfleet.simulator.work import Batch, Message, Objective, Phase

# Bytes of data gathered at once along a walk; local steps of a block that is captured, which grows with them; steps tried.
GATHERED_BYTES, CAPTURED_STEPS, TRIED = 1 << 28, 128, 2
DRAWN_ON_CPU = 1 << 16
"""Examples of a block's clients up to which their batches are drawn on the CPU, whatever the device."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything a worker needs, sent to it once.

    Attributes:
        population: the clients and their data.
        phases: by name.
        objectives: by name, for ``ops.grad``.
        functions: ``(z, batch) -> outputs`` by name, for ``ops.apply`` and evaluation.
        evaluation: split -> data (rows, ...) for evaluating a model on the server's side.
        inner: "serial", "batched" or "factored".
        device: "cpu" or "cuda".
        gpu: how a process computes there.
        notes: what this process has found out about factoring.
        captures: the kinds of blocks that this process has captured.
        held: the tensors that phases, objectives and functions hold, which nothing may write into.
        reads: what each worker reads of the clients for itself, as texts by name that have to be the same everywhere; None
            where clients' data travel with the setup.
        root: the server's own examples, as those of one client; None where it has none.
        steps: how many of a stage's steps are done, half at either end, to learn what all would take; None for all.

    """

    population: Population
    phases: Mapping[str, Phase]
    objectives: Mapping[str, Objective]
    functions: Mapping[str, Callable[[Tree, Batch], Any]]
    evaluation: Mapping[str, Mapping[str, Tensor]]
    inner: str
    device: str = "cpu"
    gpu: Gpu = EXACT
    notes: Notes = field(default_factory=Notes)
    captures: Captures = field(default_factory=Captures)
    held: ClosureTensors = field(default_factory=ClosureTensors)
    reads: Callable[[Population], Mapping[str, str]] | None = None
    root: Population | None = None
    steps: int | None = None

    @staticmethod
    def of(algorithm: Algorithm, task: Task, population: Population, inner: str, **rest: Any) -> Setup:
        """Return what workers need for an algorithm on a task; ``rest`` are the other attributes, such as ``evaluation``."""
        made = {
            "phases": phases_of(algorithm),
            "objectives": task.objectives,
            "functions": task.functions,
            "evaluation": {},
        }
        return Setup(population=population, inner=inner, **{**made, **rest})

    @property
    def authors(self) -> tuple[Any, ...]:
        """Return what authors have written."""
        return self.phases, self.objectives, self.functions

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that the functions of authors hold, by name."""
        return self.held.tensors(self.authors)

    def read_here(self) -> dict[str, str]:
        """Return what tells the data that this process reads for itself."""
        return {} if self.reads is None else dict(self.reads(self.population))

    def placed(self) -> Setup:
        """Compute as the setup says from now on, and return it with the clients' data on the device, as a worker keeps it."""
        self.gpu.take(self.device)
        device = torch.device(self.device)
        return replace(self, population=self.population.to(device), root=self.root and self.root.to(device))


def phases_of(algorithm: Algorithm) -> dict[str, Phase]:
    """Return by name what workers may be asked for: clients' phases, and the server's own."""
    return {p.name: p for p in (*algorithm.phases, *algorithm.server)}


def run_block(setup: Setup, shared: Message, task: BlockTask) -> BlockResult:
    """Run the blocks of a task on this worker, one after the other, each in halves where the device's memory does not hold it.

    Raises ClientError, naming client, phase and step, where client code raises or sends a value that is not finite, unless
    such clients are to be dropped: then the others are run again, as a block of their own.
    """
    if task.phase not in setup.phases:
        raise ClientError(
            f"phase {task.phase!r}: it is none of the algorithm's phases ({', '.join(setup.phases)}): add it"
        )
    blocks = task.blocks
    if len(blocks) > 1:
        return joined(setup.phases[task.phase].reduce, [(each, run_block(setup, shared, each)) for each in blocks])
    try:
        return _without_dropped(setup, shared, task)
    except torch.OutOfMemoryError as e:
        again = setup.captures.release()  # the block itself may have room without them
        if len(task.clients) == 1 and not again:
            raise ClientError(
                f"client {int(task.clients)}, phase {task.phase!r}: the memory of {setup.device} does not hold the work of one "
                f"client: lower algorithm.batch_size, or take a smaller model"
            ) from e
    torch.cuda.empty_cache()  # the error and what it kept alive are gone by now
    if again:
        return run_block(setup, shared, task)
    middle = len(task.clients) // 2
    halves = [task.part(rows) for rows in (slice(None, middle), slice(middle, None))]
    result = joined(setup.phases[task.phase].reduce, [(half, run_block(setup, shared, half)) for half in halves])
    return result._replace(splits=result.splits + 1)


def run_at_server(setup: Setup, shared: Message, task: BlockTask) -> BlockResult:
    """Run a block whose one client is the server, on examples of its own. Raises ClientError."""
    assert setup.root is not None  # or the run would have been refused
    return run_block(replace(setup, population=setup.root), shared, task)


def _without_dropped(setup: Setup, shared: Message, task: BlockTask) -> BlockResult:
    phase, rows, dropped = setup.phases[task.phase], torch.arange(len(task.clients)), []
    while len(rows):
        try:
            return without(phase, task, rows, dropped, _run(setup, shared, task.part(rows) if dropped else task))
        except AtFault as e:
            result = e.dropped
        dropped += [d._replace(row=int(rows[d.row])) for d in result]
        rows = rows[~torch.isin(rows, torch.tensor([d.row for d in dropped]))]
    return without(phase, task, rows, dropped)


class _Given(NamedTuple):
    """The tensors and numbers that the computation of a block depends on; ``domain`` (C,), ``counts`` (C,) float64 what each
    weighs, 0 of rows that fill it.
    """

    inputs: ClientInputs
    send: dict[str, Tree]
    config: dict[str, Any]
    domain: Tensor
    counts: Tensor


class _Sent(NamedTuple):
    """What a block computes; as in ``BlockResult``, on the device, but ``loss`` (C,) is each client's, and the rows that fill it
    are there; a client sends so many ``numbers`` and ``bits``.
    """

    partials: dict[str, Any]
    config: dict[str, Tensor]
    client_state: Tree
    loss: Tensor
    numbers: int
    bits: int


def _run(setup: Setup, shared: Message, task: BlockTask) -> BlockResult:
    phase, count = setup.phases[task.phase], len(task.clients)
    filled = task if setup.inner == "serial" else task.filled()
    device = torch.device(setup.device)
    clients = filled.clients.to(device)
    local = setup.population.local_data(clients)
    keys = rng.fold(filled.key, filled.clients, filled.copies)
    drawn = _walked(phase, local, keys, filled)
    for w in drawn:
        setup.notes.walked(*w.weight.shape[1:])
    whole = drawn if setup.steps is None else tuple(ends(w, setup.steps) for w in drawn)
    walks = T.to(whole, device)
    batches = tuple(_along(local.data, w.rows) for w in walks)
    inputs = ClientInputs(
        rng.fold(keys, "begin").to(device),
        local.counts,
        walks,
        batches,
        T.to(T.as_new(filled.client_state), device),
        T.to(T.as_new(filled.client_input), device),
        None if phase.forgery is None else phase.forgery.by(clients),
    )
    ones = torch.ones(len(clients), dtype=torch.float64)
    counts = ones if filled.weights is None else ones * filled.weights
    counts[count:] = 0.0
    counts = counts.to(device)
    given = _Given(
        inputs, T.to(T.as_new({**shared.known, **shared.send}), device), dict(shared.config), local.domain, counts
    )
    always = [w.active.all(0).tolist() for w in whole]

    def program(given: _Given) -> ClientProgram:
        return ClientProgram(phase, given.inputs, {**given.send, **given.config}, local.data, setup, always)

    def compute(given: _Given) -> _Sent:
        mine = program(given)
        return _sent(mine, task, given, torch.func.vmap(mine, randomness="error")(*T.leaves(mine.inputs)))[1]

    key = None
    if setup.inner != "serial" and None not in batches and sum(map(len, always)) <= CAPTURED_STEPS:
        dense = tuple((name, frozenset(paths)) for name, paths in setup.notes.dense.items())
        key = setup.captures.key((task.phase, setup.inner, task.discount, tuple(map(tuple, always)), dense), given)
    with torch.no_grad():
        sent = setup.captures.replay(key, given)
        if sent is None or not _trusted(task, sent):
            mine = program(given)
            sent = _ordinarily(mine, program, task, given)
            if mine.ledger is not None:
                rows, steps = [w.weight.shape[2] for w in drawn], [w.weight.shape[1] for w in drawn]
                setup.notes.worked(phase.name, zip(mine.flop, rows, steps, strict=True))
            setup.captures.ran(key, compute, given, sent)
    partials, loss, config, client_state = sent.partials, sent.loss.cpu().double(), sent.config, sent.client_state
    if len(clients) > count:
        partials = {slot: phase.reduce[slot].unfilled(p, count) for slot, p in partials.items()}
        loss, config, client_state = (T.index(of, slice(count)) for of in (loss, config, client_state))
    known = loss[~loss.isnan()]
    return BlockResult(
        partials=put_down(task.phase, task.spill, T.to(partials, "cpu")),
        config=T.to(config, "cpu"),
        client_state=T.to(client_state, "cpu"),
        steps=sum(
            count * len(all_take) if all(all_take) else int(w.active[:count].sum())
            for w, all_take, s in zip(whole, always, phase.work.loops, strict=True)
            if s.batches.works
        ),
        loss=(float(known.sum()),),
        measured=len(known),
        floats_up=count * sent.numbers,
        bytes_up=count * -(-sent.bits // 8) + T.num_bytes(config),
        losses=loss if task.feedback else None,
    )


def _walked(phase: Phase, local: LocalData, keys: Tensor, task: BlockTask) -> tuple[BatchSchedule, ...]:
    """Return the walks of clients with ``keys`` on the CPU: drawn there where they are short, for a GPU takes as long for few.

    They are whole numbers, the same wherever they are drawn, but for batches that each example is drawn for.
    """
    device = local.rows.device
    if device.type == "cpu":
        return walked(phase, local, keys, task.steps, task.limit)
    if local.rows.numel() <= DRAWN_ON_CPU and not any(stage.batches.drawn for stage in phase.work.loops):
        there = LocalData({}, *T.to(tuple(local[1:]), "cpu"))
        return walked(phase, there, keys, task.steps, task.limit)
    return walked(phase, local, keys.to(device), task.steps, task.limit)


def _trusted(task: BlockTask, sent: _Sent) -> bool:
    """Say whether values are finite, if they have to be. Those of a sum are looked at, so that uploads need not be one by one."""
    return task.faults.non_finite == "keep" or finite((sent.partials, sent.config, sent.client_state))


def _ordinarily(
    program: ClientProgram, again: Callable[[_Given], ClientProgram], task: BlockTask, given: _Given
) -> _Sent:
    """Run client code, and name the clients at fault. Raises ClientError, or AtFault where they are to be dropped."""
    setup, inputs = program.setup, given.inputs
    who = f"phase {task.phase!r}: client code"
    mine = {"client_state": inputs.client_state, "client_input": inputs.client_input, "batch": inputs.batches}
    pure = SideEffects(who, program.shared, mine, setup.tensors)
    if setup.held.first(who):
        tried = [given._replace(inputs=padded(inputs, program.phase, first=first)) for first in (True, False)]
        pure.trial(*(lambda g=g: again(g).alone(0, TRIED) for g in tried), holds=setup.authors)
    try:
        flat = _serial(program, task) if program.setup.inner == "serial" else _batched(program, task, pure)
    except AtFault:
        pure.check()  # for the others run again
        raise
    pure.check()
    out, sent = _sent(program, task, given, flat)
    if not _trusted(task, sent):
        _blame(program, task, out, sent.client_state)
    return sent


def _along(data: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor] | None:
    """Gather a whole walk (C, T, R) at once, which is fastest and lets layers see consecutive slices, if it is not too large."""
    size = sum(rows.numel() * v[0].numel() * max(4, v.element_size()) for v in data.values())
    return gather(data, rows) if size <= GATHERED_BYTES else None


def _batched(program: ClientProgram, task: BlockTask, pure: SideEffects) -> tuple[Tensor, ...]:
    try:
        return torch.func.vmap(program, randomness="error")(*T.leaves(program.inputs))
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        where = program.where
        _serial(program, task)  # names the clients and the step, if the fault is the client code's own
        pure.check()
        if "randomness" in one_line(e):
            raise Impure(f"phase {task.phase!r}, {where}: client code drew from a generator of torch: {KEYS}") from e
        raise ClientError(
            f"phase {task.phase!r}, {where}: client code runs alone but not under vmap ({type(e).__name__}: {one_line(e)}): "
            f"avoid data-dependent branches, .item() and in-place writes, or set executor.inner=serial"
        ) from e


def _serial(program: ClientProgram, task: BlockTask) -> tuple[Tensor, ...]:
    results, dropped = [], []
    for row, client in enumerate(task.clients.tolist()):
        try:
            results.append(program.alone(row))
        except torch.OutOfMemoryError:
            raise
        except Exception as e:
            error = ClientError.at(client, task.phase, program.where, e)
            if task.faults.on_client_error == "fail" or INEXACT in one_line(e):
                raise error from e
            why = f"{program.where}: {type(e).__name__}: {one_line(e)}"
            dropped.append(Dropped(row, client, why, bit_exact=False, traceback=traced(e)))
    if dropped:
        raise AtFault(dropped)
    return tuple(torch.stack(leaf) for leaf in zip(*results, strict=True))


def _sent(
    program: ClientProgram, task: BlockTask, given: _Given, flat: tuple[Tensor, ...]
) -> tuple[dict[str, Any], _Sent]:
    """Return what the clients of a block send, stacked, and what it comes to."""
    phase, out, counts = program.phase, program.result(flat), given.inputs.num_examples
    if phase.weight == "uniform":
        weight = torch.ones(len(counts), dtype=torch.float64, device=counts.device)
    elif phase.weight == "num_examples":
        weight = counts.to(torch.float64)
    else:
        weight = out["config"][phase.weight]
    unit = given.counts * task.discount
    rows = Rows(weight * unit, given.domain, unit)
    return out, _Sent(
        partials={slot: reduction.block(out["send"][slot], rows) for slot, reduction in phase.reduce.items()},
        config=out["config"],
        client_state=multiplied_out(out["client_state"]),
        loss=out["loss"],
        numbers=program.sent[0],
        bits=program.sent[1],
    )


def _blame(program: ClientProgram, task: BlockTask, out: dict[str, Any], client_state: Tree) -> NoReturn:
    """Name the clients whose values are not finite. Raises ClientError, or AtFault where they are to be dropped."""
    dropped = []
    result = not_finite({**out["send"], **out["config"]}, client_state)
    for row, what in sorted(f for f in result.items() if f[0] < len(task.clients)):
        client, why = int(task.clients[row]), what + _first_seen(program, row)
        if task.faults.non_finite == "fail":
            raise ClientError(f"client {client}, phase {task.phase!r}: {why}: training diverged, so {LOWER}")
        dropped.append(Dropped(row, client, why, bit_exact=True))
    if dropped:
        raise AtFault(dropped)
    raise ClientError(
        f"phase {task.phase!r}: the sum of what clients send overflows, though each is finite: lower the learning rates"
    )


def _first_seen(program: ClientProgram, row: int) -> str:
    """Run a client again, alone, to say after which step its values are no longer finite; say nothing if they always are."""
    program.watch = Watch()
    with contextlib.suppress(Exception):
        try:
            program.alone(row)
        except NotFinite:
            return f", first seen after {program.where}"
    return ""
