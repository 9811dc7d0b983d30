"""The work of one client as a function from tensors to tensors, so that it can be run alone or mapped over many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator import authored
from fedfleet.simulator.arithmetic import rng, vmap_internals
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.combination import Combination
from fedfleet.simulator.arithmetic.factored import Factored, Ledger
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.batches import BatchSchedule, wider
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.block.secure_sum import encoded
from fedfleet.simulator.block.update_attack import forged
from fedfleet.simulator.block.uplink import Remembering, through
from fedfleet.simulator.errors import of_kind
from fedfleet.simulator.population import gather
from fedfleet.simulator.signals import contained
from fedfleet.simulator.work import Batch, Message, Phase, StepInfo


class ClientInputs(NamedTuple):
    """What differs between the clients of a block, stacked (first axis C).

    Attributes:
        key, num_examples: (C,) int64.
        walks: a ``BatchSchedule`` a stage.
        batches: a stage's data along its walk, name -> (C, T, R, ...); None where each step gathers its own.
        client_state, client_input: what the client keeps and gets, None for nothing.
        forges: (C,) bool, whether it is one that sends something else; None where none is.

    """

    key: Tensor
    num_examples: Tensor
    walks: tuple[BatchSchedule, ...]
    batches: tuple[dict[str, Tensor] | None, ...]
    client_state: Tree
    client_input: Tree
    forges: Tensor | None = None


def padded(inputs: ClientInputs, phase: Phase, *, first: bool) -> ClientInputs:
    """Return inputs with one row more in every batch, which does not count: the first, or the last, of all that a client sees."""
    stages = zip(inputs.walks, phase.work.loops, strict=True)
    walks = tuple(wider(schedule, stage.batches.per_step, first=first) for schedule, stage in stages)
    return inputs._replace(walks=walks, batches=(None,) * len(walks))


class ClientProgram:
    """One client's phase, callable on the leaves of its slice of ``ClientInputs``, alone or under ``vmap``.

    After a call, ``result`` makes ``{"send", "config", "client_state", "loss"}`` of it, ``sent`` is the numbers and the bits
    of what the client really sends, ``flop`` the operations of each step of each stage, if counted, and ``where`` names the
    last step it was in (for error messages). ``watch``, where given, is called with the values after each step of a client alone.
    """

    def __init__(
        self,
        phase: Phase,
        inputs: ClientInputs,
        shared: Mapping[str, Any],
        data: Mapping[str, Tensor],
        setup: Any,
        always: list[list[bool]],
    ):
        self.phase, self.inputs, self.shared, self.data, self.setup = phase, inputs, shared, data, setup
        self.always = always  # per stage and step: whether all clients of the block take it, so that no mask is needed
        self.ledger: Ledger | None = None
        self.out: Tree = None
        self.sent = 0, 0
        self.flop: list[list[int]] = []
        self.combinations: list[Combination] = []
        self.where = "client_init"
        self.watch: Callable[[Tree], None] | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run client_init, every step of every stage, client_final. Raises EndsProgram where client code would end the program."""
        with contained():
            return self._run(*tensors)

    def _run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        key, count, walks, batches, client_state, client_input, forges = T.unflatten(self.inputs, tensors)
        work, shared = self.phase.work, self.shared
        kept = client_state if isinstance(client_state, Remembering) else None
        client_state = client_state if kept is None else kept.client_state
        if (
            self.setup.inner == "factored" and vmap_internals.level() is not None
        ):  # a client alone has its weights as they are
            self.ledger = Ledger(len(self.inputs.num_examples), self.setup.notes)
            for data in self.inputs.batches:
                for inputs in () if data is None else data.values():
                    self.ledger.walk(inputs)
        self.where = "client_init"
        carry = work.client_init(shared, client_state, client_input, key)
        watch = self.watch if vmap_internals.level() is None else None
        if watch is not None:
            watch(carry)
        losses: list[Tensor] = []
        measured: list[Tensor] = []
        self.flop = [[] for _ in walks]
        for s, schedule in enumerate(walks):
            for k, step in enumerate(
                map(BatchSchedule._make, zip(*(field.unbind(0) for field in schedule), strict=True))
            ):
                self.where = f"stage {s}, step {k}"
                result = batches[s]
                data = gather(self.data, step.rows) if result is None else {n: v[k] for n, v in result.items()}
                new, step_loss = self._step(s, step, Batch(data, step.weight), k, carry, count)
                carry = new if self.always[s][k] else T.where(step.active, new, carry)
                if watch is not None:
                    watch(carry)
                if step_loss is not None:
                    losses.append(step_loss)
                    measured.append(step.active)
        self.where = "client_final"
        message, new_state = authored.sent(work.client_final(shared, client_state, client_input, carry))
        if self.phase.secure is None:  # else other slots are reduced, those of the masked sums
            check_message(message, self.phase)
        if client_state is not None:
            check_state(client_state, new_state)
        elif T.leaves(new_state):
            raise ValueError(
                "it returns a state, which is lost: give Phase.client_state, a new client's state, or return None"
            )
        client_state = new_state
        name, notes = self.phase.name, self.setup.notes
        if name not in notes.sent:
            notes.sent[name] = _hollow(dict(message.send))
        memory = None if kept is None else kept.memory.get(name)
        send = dict(message.send)
        if forges is not None and self.phase.forgery is not None:
            send = forged(self.phase.forgery, send, shared, forges, rng.fold(key, "forgery"))
        up = rng.fold(key, "uplink") if self.phase.uplink else key
        passed = through(self.phase.uplink, send, shared, memory, up)
        self.sent, sends = (passed.numbers, passed.bits), passed.send
        if (secure := self.phase.secure) is not None:
            sends, *sent = encoded(secure, passed.send, shared, count, rng.fold(key, "secure"))
            self.sent = sent[0], sent[1]
        if kept is not None:
            client_state = Remembering(
                client_state, kept.memory if memory is None else {**kept.memory, name: passed.memory}
            )
        if name not in notes.kept:
            notes.kept[name] = T.num_bytes(_hollow(client_state))
        told = {**message.config, **passed.scalars}
        config = {k: torch.as_tensor(v, dtype=torch.float64, device=count.device) for k, v in told.items()}
        out = {"send": sends, "config": config, "client_state": client_state, "loss": _mean(losses, measured, count)}
        self.out = out
        self.combinations = [x.combination() for x in T.leaves(out) if isinstance(x, Factored)]
        return tuple(x for x in T.leaves(out) if not isinstance(x, Factored))

    def _step(
        self, s: int, at: BatchSchedule, batch: Batch, k: int, carry: Tree, count: Tensor
    ) -> tuple[Tree, Tensor | None]:
        """Run step ``k`` of stage ``s``; return the new carry and the training loss, None where the step took no gradient."""
        stage = self.phase.work.loops[s]
        given: Any = batch.split(stage.batches.per_step) if stage.batches.per_step > 1 else batch
        if self.ledger is not None:
            last = (s, k) == (len(self.always) - 1, len(self.always[-1]) - 1)
            self.ledger.last = last and stage.batches.per_step == 1
        before = 0 if self.ledger is None else self.ledger.flop
        ops = EngineOps(self.setup.objectives, self.setup.functions, self.ledger, self.setup.notes)
        new = stage.step(ops, self.shared, carry, given, StepInfo(k, at.epoch, at.epoch_end, count), at.key)
        if self.ledger is not None:
            self.flop[s].append(self.ledger.flop - before)
        return new, ops.loss

    def alone(self, row: int, most: int | None = None) -> tuple[Tensor, ...]:
        """Run one client of the block; alone it takes its own steps and no more, ``most`` of each stage where given."""
        mine: ClientInputs = T.index(self.inputs, row)
        walks = tuple(T.map(lambda t, w=w: t[: int(w.active.sum())][:most], w) for w in mine.walks)
        self.always, self.ledger = [[True] * len(w.active) for w in walks], None
        return self(*T.leaves(mine._replace(walks=walks)))

    def result(self, stacked: tuple[Tensor, ...]) -> dict[str, Any]:
        """Return what ``out`` is for all clients, from its stacked tensors; factored leaves become combinations."""
        tensors, combinations = iter(stacked), iter(self.combinations)
        return T.map(lambda x: next(combinations) if isinstance(x, Factored) else next(tensors), self.out)


def check_message(message: Message, phase: Phase) -> None:
    """Raise ValueError where a client does not send what its phase reduces and no more, or the number that it is weighed by."""
    if missing := phase.reduce.keys() - message.send.keys():
        raise ValueError(
            f"Phase.reduce has {_listed(sorted(missing))}, and it sends {_listed(dict(message.send))}: send it, or do not reduce it"
        )
    if unused := message.send.keys() - phase.reduce.keys():
        raise ValueError(
            f"it sends {_listed(sorted(unused))}, which Phase.reduce has not: say there how it is reduced, or do not send it"
        )
    for slot, tree in message.send.items():
        if strange := [leaf for leaf in T.leaves(tree) if not isinstance(leaf, Tensor)]:
            raise ValueError(
                f"its slot {slot} has {of_kind(strange[0])}: send tensors, such as torch.tensor(…), or put numbers into config"
            )
    if phase.weight not in ("uniform", "num_examples") and phase.weight not in message.config:
        raise ValueError(
            f"Phase.weight is {phase.weight!r}, and it sends no such number: put it into the message's config, or choose "
            f"'num_examples' or 'uniform'"
        )


def check_state(before: Tree, after: Tree) -> None:
    """Raise ValueError where a client's next state is not made as its state before: of other names, shapes or types."""
    was, now = dict(T.named_leaves(before)), dict(T.named_leaves(after))
    if T.structure(before) != T.structure(after):
        raise ValueError(
            f"the next state has {_listed(now)}, and the state before {_listed(was)}: return the same names"
        )
    for name, leaf in was.items():
        new = now[name]
        if isinstance(leaf, Tensor) != isinstance(new, Tensor):
            raise ValueError(f"the next state's {name} is a {type(new).__name__}, and was a {type(leaf).__name__}")
        if isinstance(leaf, Tensor) and (leaf.shape, leaf.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"the next state's {name} is {tuple(new.shape)} {new.dtype}, and was {tuple(leaf.shape)} {leaf.dtype}: "
                f"return it as Phase.client_state made it"
            )


def _hollow(tree: Tree) -> Tree:
    """Return a tree of tensors without content."""
    return T.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), tree)


def _listed(leaves: Collection[str]) -> str:
    return ", ".join(leaves) if any(leaves) else "a value without a name" if leaves else "nothing"


def _mean(losses: list[Tensor], measured: list[Tensor], like: Tensor) -> Tensor:
    """Average a client's losses over the steps it took; NaN where no step took a gradient."""
    if not losses:
        return torch.full((), torch.nan, device=like.device)
    taken, values = torch.stack(measured), torch.stack(losses)
    return torch.where(taken, values, 0.0).sum() / taken.sum()
