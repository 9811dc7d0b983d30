"""FACT beside a version of its own: torch's nets, a pair of its optimisers a client, kept for the run."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adaptation import build, records, world
from harness import World
from torch import Tensor, nn

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.work import BatchPlan
from fedfleet.tasks.stateful import Dropout
from fedfleet.tasks.two_heads_nets import NETS
from tests.parts import slow_but

BATCH, LR, MOMENTUM, DECAY, ROUNDS = 6, 0.3, 0.9, 0.01, 6

GIVEN: dict[str, Any] = {
    **{"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "rounds": ROUNDS, "batch_size": BATCH, "select": "last"}
}


def batches(where: World, t: int, exchange: int, client: int, epochs: int) -> Iterator[tuple[Tensor, bool]]:
    """Rows of each minibatch that the engine draws for a client, and whether an epoch ends with it."""
    key = rng.fold(rng.key(0), "client", t, 0)
    for _ in range(exchange):
        key = rng.fold(key, "next")
    local = where.population.local_data(torch.tensor([client]))
    mine = rng.fold(rng.fold(key, torch.tensor([client]), torch.tensor([0])), "stage", 0)
    walk = schedule(BatchPlan(size=BATCH, epochs=epochs), local.rows, local.counts, mine)
    for rows, weight, ends in zip(walk.rows[0], walk.weight[0], walk.epoch_end[0], strict=True):
        yield rows[weight > 0], bool(ends)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


class Client:
    """Nets and optimisers that are made once."""

    def __init__(self, g: nn.Module, f: nn.Module, run: Run):
        self.g, self.f, self.run, self.epochs = copy.deepcopy(g), copy.deepcopy(f), run, 0
        self.fresh()

    def fresh(self) -> None:
        given = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
        self.of_g, self.of_f = (torch.optim.SGD(net.parameters(), **given) for net in (self.g, self.f))

    def train(self, t: int, exchange: int, client: int, epochs: int, *, head_only: bool = False) -> None:
        x, y = (self.run.where.population.data[k] for k in ("x", "y"))
        for rows, ends in batches(self.run.where, t, exchange, client, epochs):
            for o in (self.of_g, self.of_f):
                set_rate(o, self.run.rate(self.epochs))
                o.zero_grad()
            scores = self.f(self.g(x[rows]))
            scores = scores.softmax(1) if self.run.double else scores
            nn.functional.cross_entropy(scores, y[rows]).backward()
            self.of_f.step()
            if not head_only:
                self.of_g.step()
                self.epochs += ends


class Run:
    """Rounds, a pair at a time."""

    def __init__(self, where: World, z: Any, options: dict[str, Any], task: dict[str, Any]):
        self.where, self.options = where, options
        self.epochs, self.double = options.get("epochs", 1), task.get("double_softmax", True)
        self.share = 10 if task.get("idd_reduction") == "class_sum" else 1
        g, f = NETS[task.get("model", "mlp")]((1, 8, 8), 10, (8,))
        for layer in f:
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        for net, part in ((g, "x"), (f, "head")):
            net.double().load_state_dict(self.of_part(z, part), strict=False)
        self.g, self.f = g.state_dict(), f.state_dict()
        n = where.population.size
        self.clients = [Client(g, f, self) for _ in range(n)]
        self.heads = copy.deepcopy(f), copy.deepcopy(f)
        self.targets = [c for c in range(n) if where.population.labelled[c] == 0]

    @staticmethod
    def of_part(z: Any, part: str) -> dict[str, Tensor]:
        """A part of ours as a state dict."""
        return {**z[part], **{n.partition(".")[2]: v for n, v in z.get("b", {}).items() if n.startswith(f"{part}.")}}

    def rate(self, epochs: int) -> float:
        return LR * (1 + 10 * epochs / (self.epochs * ROUNDS)) ** -0.75

    def sources(self, t: int, pair: list[int]) -> tuple[dict, list[dict]]:
        """Return the generator's state dict after steps 1 and 2, and the heads'."""
        everybody = [self.clients[c] for c in (*pair, *self.targets)]
        for c in everybody:
            if self.options.get("optimizer_state") == "reset":
                c.fresh()
            if self.options.get("lr_clock") == "global":
                c.epochs = t * self.epochs
        for c in pair:
            self.clients[c].g.load_state_dict(self.g)
            self.clients[c].f.load_state_dict(self.f)
            self.clients[c].train(t, 0, c, self.epochs)
        mean = averaged([self.clients[c].g.state_dict() for c in pair])
        tunes = self.options.get("fine_tune", True)
        for c in pair if tunes else ():
            self.clients[c].g.load_state_dict(mean)
            self.clients[c].train(t, 1, c, self.options.get("finetune_epochs", 1), head_only=True)
        sent = [copy.deepcopy(self.clients[c].f.state_dict()) for c in pair]
        return mean, sent

    def round(self, t: int, pair: list[int]) -> tuple[dict, dict, dict, float]:
        """Return the generator's and the two heads' state dicts after a round, and the discrepancy."""
        mean, sent = self.sources(t, pair)
        exchange = 2 if self.options.get("fine_tune", True) else 1
        found = [self.minimise(t, exchange, c, mean, sent) for c in self.targets]
        self.g = averaged([g for g, _, _ in found])
        heads = [averaged([h[i] for _, h, _ in found]) for i in (0, 1)]
        self.f = averaged(heads)
        return self.g, heads[0], heads[1], sum(idd for *_, idd in found) / len(found)

    def minimise(
        self, t: int, exchange: int, client: int, g: dict, heads: list[dict]
    ) -> tuple[dict, list[dict], float]:
        me, x = self.clients[client], self.where.population.data["x"]
        me.g.load_state_dict(g)
        for net, found in zip(self.heads, heads, strict=True):
            net.load_state_dict(found)
        seen: list[float] = []
        last: list[float] = []
        for rows, ends in batches(self.where, t, exchange, client, self.epochs):
            set_rate(me.of_g, self.rate(me.epochs))
            me.of_g.zero_grad()
            features = me.g(x[rows])
            one, two = (f(features).softmax(1) for f in self.heads)
            if self.double:
                one, two = one.softmax(1), two.softmax(1)
            loss = (one - two).abs().mean() * self.share
            loss.backward()
            seen.append(float(loss.detach()))
            me.of_g.step()
            if ends:
                me.epochs, last, seen = me.epochs + 1, seen, []
        state = [copy.deepcopy(n.state_dict()) for n in (me.g, *self.heads)]
        return state[0], state[1:], sum(last) / len(last)


def averaged(states: list[dict]) -> dict:
    return {k: torch.stack([s[k].double() for s in states]).mean(0) for k in states[0]}


@pytest.mark.parametrize("inner", slow_but(["serial", "batched"], "serial"))
@pytest.mark.parametrize(
    ("options", "task", "targets"),
    [
        ({}, {}, (4,)),
        ({"epochs": 2, "finetune_epochs": 2}, {"double_softmax": False, "idd_reduction": "class_sum"}, (0,)),
        ({"epochs": 3, "fine_tune": False}, {"double_softmax": False}, (1, 3)),
        ({"epochs": 2, "lr_clock": "global"}, {"double_softmax": False, "idd_reduction": "class_sum"}, (2, 4)),
        ({"optimizer_state": "reset"}, {"double_softmax": False, "idd_reduction": "class_sum"}, (4,)),
        ({"optimizer_state": "reset", "fine_tune": False}, {}, (4,)),
        ({"epochs": 2}, {"model": "digits_small"}, (2, 4)),
    ],
    ids=["default", "sums", "nf", "global clock", "reset", "reset, nf", "statistics"],
)
def test_rounds_are_those_of_torch(options, task, targets, inner):
    where = world(targets=targets, dtype=torch.float64, **task)
    for layer in where.task._nets.head.modules():
        if isinstance(layer, Dropout):
            layer.p = 0.0
    z = T.map(torch.Tensor.double, where.task.init(0))
    given = {**GIVEN, **options}
    by_torch = Run(where, z, options, task)
    seen = set()
    for r in records(build(where.task, **given), where, ROUNDS, z=z, inner=inner):
        pair = sorted(r.phases[0].clients.tolist(), key=lambda c: -int(where.population.num_examples(torch.tensor(c))))
        seen |= {*pair}
        g, *heads, idd = by_torch.round(r.index, pair)
        check(r.state.model, g, *heads)
        assert r.metrics["idd"] == pytest.approx(idd, rel=1e-6)
    assert len(seen) == 5 - len(targets)  # some came twice, so that what they keep matters


def check(model: Any, *wanted: dict[str, Tensor]) -> None:
    for part, want in zip(("x", "head", "second"), wanted, strict=True):
        for name, v in Run.of_part(model, part).items():
            torch.testing.assert_close(v, want[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"fine_tune": False}])
def test_a_client_that_answers_alone_trains_the_model_by_itself(options):
    """G is its generator, and both heads are its own, tuned on it; there is no step 3."""
    where = world(dtype=torch.float64)
    z = T.map(torch.Tensor.double, where.task.init(0))
    by_torch = Run(where, z, options, {})
    first = {"federation": Federation(policy=First(1)), "z": z}
    for r in records(build(where.task, **GIVEN, **options), where, 4, **first):
        heard = [p.clients[p.responses.completed].tolist() for p in r.phases]
        assert len(heard) == (1 if options else 2)
        assert all(who == heard[0] for who in heard)
        g, (head,) = by_torch.sources(r.index, heard[0])
        check(r.state.model, g, head, head)
        by_torch.g, by_torch.f = g, head
        assert math.isnan(r.metrics["idd"])
