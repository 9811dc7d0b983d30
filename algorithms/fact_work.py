"""The work of FACT's clients: train on labels, fine-tune the head, minimise the discrepancy of two heads.

The discrepancy is that of the heads on unlabelled data. A client keeps one optimiser between rounds, an SGD with
momentum, and one clock. The clock counts the epochs it has trained, without those of fine-tuning. Its learning rate
follows the clock:

    eta(e) = lr (1 + 10 e / (epochs rounds))^-0.75,    one step of the schedule an epoch.

A net travels as its trained parameters, "w", and its running statistics, "b".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from fedfleet.algorithms.options import AlgorithmOptions, LocalData
from fedfleet.simulator.author import (
    BUFFERS,
    Batch,
    BatchPlan,
    Key,
    LocalLoop,
    LocalWork,
    Message,
    Ops,
    StepInfo,
    T,
    Tree,
    sgd,
)

SPAN, POWER = 10.0, -0.75  # of the schedule, which ends at 11^-0.75 = 0.17 where a client trains in all rounds


class WorkOptions(AlgorithmOptions):
    """How clients train."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the local data a round, E, of source clients and of target clients."""
    batch_size: int = Field(default=128, ge=1)
    """Examples a step, B."""
    lr: float = Field(default=0.005, gt=0)
    """Learning rate at the beginning, eta_0."""
    target_lr: float | None = Field(default=None, ge=0)
    """That of target clients; ``lr`` if not given. Three times as much weighs the discrepancy three times as much, but for
    weight decay."""
    rounds: int | None = Field(default=None, ge=1)
    """Rounds, R, that the schedule and the burn-in are made for, those of the run; if not given, the rate stays as it is."""
    lr_clock: Literal["client", "global"] = "client"
    """Let a client's rate fall with the epochs it has trained itself, as in the released code; or with those of the run."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=5e-4, ge=0)
    """Acts on target clients' generator too."""
    optimizer_state: Literal["persist", "reset"] = "persist"
    """Clients keep their momentum between rounds, as in the released code, at the cost of a model a client; or start afresh."""
    fine_tune: bool = True
    """Train the heads once more on the averaged generator; false is FACT-NF."""
    finetune_epochs: int = Field(default=1, ge=0)
    """Passes over the local data for that; one in the released code, whatever ``epochs`` is. 0 is FACT-NF too."""

    def local_data(self) -> LocalData:
        """Return how much of its data a client takes at once."""
        return self._batches(self.batch_size, epochs=self.epochs)

    @property
    def tunes(self) -> bool:
        """Say whether there is a second phase."""
        return self.fine_tune and self.finetune_epochs > 0

    def rate(self, epochs: Tensor, at_first: float) -> Tensor:
        """Return the learning rate after so many epochs."""
        if self.rounds is None:
            return torch.full_like(epochs, at_first)
        return at_first * (1 + SPAN * epochs / (self.epochs * self.rounds)) ** POWER


def net(z: Tree, part: str) -> Tree:
    """Return a part of a model, with its running statistics, as a net of its own."""
    seen = {n.partition(".")[2]: v for n, v in z.get(BUFFERS, {}).items() if n.partition(".")[0] == part}
    return {"w": z[part], "b": seen}


def model(**nets: Tree) -> Tree:
    """Return the model of which these nets are the parts."""
    seen = {f"{part}.{n}": v for part, result in nets.items() for n, v in result["b"].items()}
    return {part: result["w"] for part, result in nets.items()} | ({BUFFERS: seen} if seen else {})


class Training(NamedTuple):
    """A client in the middle of its steps: the model, momentum of the parts that it trains, the epochs on its clock."""

    z: Tree
    momentum: Tree
    epochs: Tensor


class Minimising(NamedTuple):
    """The same, with the sum of the discrepancies before each step of this epoch, their number, and whether the epoch is over."""

    training: Training
    total: Tensor
    batches: Tensor
    ended: Tensor


class Work:
    """The work of a client in each phase, as the options say."""

    def __init__(self, options: WorkOptions):
        self._options = options
        self._rule = sgd(momentum=options.momentum, weight_decay=options.weight_decay)
        kept = ("x", "head") if options.optimizer_state == "persist" else ("head",) if options.tunes else ()
        self._kept = kept if options.momentum else ()

    def clock(self, epochs: int) -> dict[str, float]:
        """Return what goes with a message of the epochs of the run so far; nothing where clients go by their own."""
        return {"epochs": float(epochs)} if self._options.lr_clock == "global" else {}

    def fresh(self, shared: Mapping[str, Any]) -> Tree:
        """Return the state of a client that has not taken part: the same tree for source and target clients.

        "head" is what a source client keeps of its training until it fine-tunes, in the same round.
        """
        z = shared["z"]
        head = T.zeros_like(net(z, "head")) if self._options.tunes else None
        momentum = {p: T.zeros_like(z[p]) for p in self._kept}
        return {"epochs": torch.zeros((), dtype=torch.float64), "momentum": momentum, "head": head}

    def _begin(
        self, shared: Mapping[str, Any], client_state: Tree, z: Tree, trained: tuple[str, ...], *, anew: bool
    ) -> Training:
        """Return a client that is about to train some parts, with momentum from before, or ``anew``."""
        none_yet = self._rule.init({p: z[p] for p in trained})
        momentum = none_yet if anew or none_yet is None else {p: client_state["momentum"][p] for p in trained}
        epochs = client_state["epochs"]
        if self._options.lr_clock == "global":
            epochs = torch.zeros_like(epochs) + shared["epochs"]
        return Training(z, momentum, epochs)

    def _step(
        self, ops: Ops, objective: str, at: Training, d: Tree, trained: tuple[str, ...], first: float
    ) -> Training:
        """Step the trained parts along a direction; running statistics become those of the last gradient."""
        parts = {p: at.z[p] for p in trained}
        d_parts, momentum = self._rule.update(at.momentum, {p: d[p] for p in trained}, parts)
        if BUFFERS in at.z:
            parts, d_parts = ({**those, BUFFERS: of[BUFFERS]} for those, of in ((parts, at.z), (d_parts, d)))
        lr = self._options.rate(at.epochs, first).to(T.leaves(parts)[0].dtype)
        return at._replace(z={**at.z, **ops.step(objective, parts, lr, d_parts)}, momentum=momentum)

    def _keep(self, client_state: Tree, at: Training, **more: Any) -> Tree:
        """Return a client's state after its steps."""
        result = at.momentum or {}
        return {**client_state, "momentum": {p: result.get(p, client_state["momentum"][p]) for p in self._kept}, **more}

    def _plan(self, epochs: int) -> BatchPlan:
        return BatchPlan(size=self._options.batch_size, epochs=epochs, stratified="spread")

    def source(self) -> LocalWork:
        """Return step 1: train generator and head on labels. Upload the generator; the head too where it is not tuned."""
        o, both = self._options, ("x", "head")

        def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Training:
            return self._begin(shared, client_state, shared["z"], both, anew=o.optimizer_state == "reset")

        def step(
            ops: Ops, shared: Mapping[str, Any], local: Training, batch: Batch, at: StepInfo, key: Key
        ) -> Training:
            d, _ = ops.grad("train", local.z, batch, key)
            local = self._step(ops, "train", local, d, both, o.lr)
            return local._replace(epochs=local.epochs + at.epoch_end)

        def client_final(
            shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Training
        ) -> tuple[Message, Tree]:
            g, head = (net(local.z, p) for p in both)
            client_state = self._keep(client_state, local, epochs=local.epochs, head=head if o.tunes else None)
            return Message({"g": g} if o.tunes else {"g": g, "head": head}), client_state

        return LocalWork(
            client_init=client_init,
            loops=(LocalLoop(step=step, batches=self._plan(o.epochs)),),
            client_final=client_final,
        )

    def tuning(self) -> LocalWork:
        """Return step 2: train the head further, on the generator that both clients get. Upload it."""
        o, head = self._options, ("head",)

        def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Training:
            z = model(x=shared["g"], head=client_state["head"])
            return self._begin(shared, client_state, z, head, anew=False)

        def step(
            ops: Ops, shared: Mapping[str, Any], local: Training, batch: Batch, at: StepInfo, key: Key
        ) -> Training:
            d, _ = ops.grad("train", local.z, batch, key, wrt=head)
            return self._step(ops, "train", local, d, head, o.lr)

        def client_final(
            shared: Mapping[str, Any], client_state: Tree, client_input: Tree, local: Training
        ) -> tuple[Message, Tree]:
            return Message({"head": net(local.z, "head")}), self._keep(client_state, local)

        return LocalWork(
            client_init=client_init,
            loops=(LocalLoop(step=step, batches=self._plan(o.finetune_epochs)),),
            client_final=client_final,
        )

    def target(self, *, statistics: bool) -> LocalWork:
        """Return step 3: bring two heads together by the generator alone. Upload it, and the heads' ``statistics``.

        "idd" is the mean discrepancy over the batches of the last epoch, each before its step.
        """
        o, generator = self._options, ("x",)
        lr = o.lr if o.target_lr is None else o.target_lr

        def client_init(shared: Mapping[str, Any], client_state: Tree, client_input: Tree, key: Key) -> Minimising:
            local = self._begin(shared, client_state, shared["z"], generator, anew=o.optimizer_state == "reset")
            none = torch.zeros_like(local.epochs)
            return Minimising(local, none, none, none.bool())

        def step(
            ops: Ops, shared: Mapping[str, Any], so_far: Minimising, batch: Batch, at: StepInfo, key: Key
        ) -> Minimising:
            d, result = ops.grad("idd", so_far.training.z, batch, key)
            local = self._step(ops, "idd", so_far.training, d, generator, lr)
            total, batches = (torch.where(so_far.ended, 0.0, v) for v in (so_far.total, so_far.batches))
            local = local._replace(epochs=local.epochs + at.epoch_end)
            return Minimising(local, total + result["loss"], batches + 1, at.epoch_end)

        def client_final(
            shared: Mapping[str, Any], client_state: Tree, client_input: Tree, done: Minimising
        ) -> tuple[Message, Tree]:
            local = done.training
            send = {"g": net(local.z, "x")}
            if statistics:
                send["statistics"] = {p: net(local.z, p)["b"] for p in ("head", "second")}
            return Message(send, {"idd": done.total / done.batches}), self._keep(
                client_state, local, epochs=local.epochs
            )

        return LocalWork(
            client_init=client_init,
            loops=(LocalLoop(step=step, batches=self._plan(o.epochs)),),
            client_final=client_final,
        )
