"""Nets as users write them, named by tests as ``tests.tasks.own_nets:…``."""

from __future__ import annotations

import math

import torch
from torch import nn

SLOPE = 1.0


def logistic(shape, classes):
    """The layers of the built-in net of that name, in its order."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(width=8, *, shape, classes):
    flat = math.prod(shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(flat, width), nn.ReLU(), nn.Linear(width, classes))


class Normed(nn.Module):
    """BatchNorm, Dropout, a buffer that is a constant and a layer that is not learnt."""

    def __init__(self, classes: int):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))
        self.fixed = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, classes)
        self.fixed.requires_grad_(False)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.fixed(x.flatten(1) * self.scale)))))


class Reader(nn.Module):
    """Rows of an image as a sequence, through layers that torch has one call each for."""

    def __init__(self, kind: str = "LSTM", classes: int = 10):
        super().__init__()
        self.layer = getattr(nn, kind)(8, 6, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.layer(x[:, 0])[0][:, -1])


class Attention(nn.Module):
    """A transformer's layer with a dropout of its own, and positions in a buffer."""

    def __init__(self, classes: int, dropout: float = 0.0):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layer.self_attn.dropout = dropout
        self.register_buffer("places", torch.linspace(0, 1, 8)[:, None].expand(8, 8).clone())
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.layer(x[:, 0] + self.places).mean(1))


class Twice(nn.Module):
    """A layer of statistics and one of weights, each under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.middle, self.last = (
            nn.Linear(64, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 8),
            nn.Linear(8, 10),
        )
        self.again, self.between = self.norm, self.middle

    def forward(self, x):
        x = self.middle(torch.relu(self.norm(self.first(x.flatten(1)))))
        return self.last(self.between(torch.relu(self.again(x))))


class Halved(nn.Module):
    """A layer of 16 bits among others."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.middle(torch.relu(self.first(x.flatten(1))).bfloat16()).float())


class Tied(nn.Module):
    """Two layers of one weight, the last of them registered first."""

    def __init__(self, classes: int):
        super().__init__()
        self.out = nn.Linear(16, classes)
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 16, bias=False)
        self.c = nn.Linear(16, 16, bias=False)
        self.c.weight = self.b.weight

    def forward(self, x):
        return self.out(torch.tanh(self.c(torch.tanh(self.b(self.a(x.flatten(1)))))))


def plain(out: int = 1, features: int = 3):
    return nn.Linear(features, out)


class Words(nn.Module):
    """The next of each of some words."""

    def __init__(self, words: int = 7):
        super().__init__()
        self.embedding, self.layer, self.head = (
            nn.Embedding(words, 5), nn.GRU(5, 6, batch_first=True), nn.Linear(6, words),
        )  # fmt: skip

    def forward(self, x):
        return self.head(self.layer(self.embedding(x))[0])


# What is refused
def no_net():
    return {"a": 1}


def broken(classes):
    raise KeyError("width")


def leaving(classes):
    raise SystemExit(0)


def unlearnt(classes):
    return nn.Sequential(nn.Flatten(), nn.ReLU())


def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def needs(depth):
    return nn.Linear(depth, depth)


class By(nn.Module):
    """A net whose forward is a function of its layer and the examples."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        return self.layer(x.flatten(1))


class Branching(By):
    def forward(self, x):
        found = super().forward(x)
        return found if found.sum() > 0 else 2 * found


class Item(By):
    def forward(self, x):
        return super().forward(x) * x.abs().max().item()


class InPlace(By):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Drawing(By):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Counting(By):
    def __init__(self, classes: int = 10):
        super().__init__(classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return super().forward(x)


class Pair(By):
    def forward(self, x):
        return super().forward(x), x


class Mean(By):
    def forward(self, x):
        return super().forward(x).mean(0)


class OverTheBatch(By):
    def forward(self, x):
        found = super().forward(x)
        return found - found.mean(0)


class ByTheCount(By):
    def forward(self, x):
        return super().forward(x) / len(x)


class Replacing(By):
    def forward(self, x):
        self.layer.weight.data = self.layer.weight.data.clamp(-0.01, 0.01)
        return super().forward(x)


class InOneMemory(By):
    """Two layers whose weights torch moves together, since they are one place of memory."""

    def __init__(self, classes: int = 10):
        super().__init__(classes)
        self.last = nn.Linear(64, classes)
        self.last.weight.data = self.layer.weight.data


class Weighing(nn.Module):
    """A loss that learns how much it counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, y):
        return self.scale * (outputs[:, 0] - y).square()


class Listed(By):
    """Takes its weight from a list, where nobody finds it."""

    def __init__(self, classes: int = 10):
        super().__init__(classes)
        self.kept = [self.layer.weight]

    def forward(self, x):
        return x.flatten(1) @ self.kept[0].T + self.layer.bias


def at_random(classes):
    import random

    net = By(classes)
    with torch.no_grad():
        net.layer.weight.fill_(random.random())
    return net


def halved(outputs, y):
    return (outputs[:, 0] - y).square() / 2


def overall(outputs, y):
    return (outputs[:, 0] - y).square().sum()


def worst(outputs, y):
    return float((outputs[:, 0] - y).abs().max())


# Whole parts
def damped(task, cohort, lr=0.1, damping=0.5):
    """FedAvg whose gradients are damped, of as many clients as the configuration says."""
    from fedfleet.simulator.author import Algorithm, BatchPlan, LocalLoop, LocalWork, Mean, Message, Phase, T, View

    def step(ops, shared, z, batch, at, key):
        return ops.step("train", z, lr, T.scale(damping, ops.grad("train", z, batch, key)[0]))

    work = LocalWork(
        client_init=lambda shared, client_state, client_input, key: shared["z"],
        loops=(LocalLoop(step=step, batches=BatchPlan(size=5, steps=2)),),
        client_final=lambda shared, client_state, client_input, z: (Message(send={"z": z}), client_state),
    )
    phase = Phase(name="train", work=work, reduce={"z": Mean()})

    def round_(z, rnd):
        answers = rnd.map_reduce(phase, shared=Message(send={"z": z}), cohort=rnd.invite(cohort.size))
        return answers["z"], {}

    return Algorithm(lambda z, key, problem: z, round_, (phase,), {"global": View(lambda z: z)}, requires=task.parts)


def blind(lr=0.1):
    return damped(type("Task", (), {"parts": ("x",)}), type("Cohort", (), {"size": 2}), lr)._replace(views={})


def regression(shape, width=4):
    from fedfleet.tasks import from_module

    return from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width)), loss="cross_entropy")


class Normalised(nn.Sequential):
    """A BatchNorm between two layers, which may keep no statistics."""

    def __init__(self, classes, counts=True):
        norm = nn.BatchNorm1d(6, track_running_stats=counts)
        super().__init__(nn.Linear(8, 6), norm, nn.Linear(6, classes))
