"""Server code, metrics and populations made in Python: what would give other numbers another time is refused before the run."""

import itertools
import json
import random
import re
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import fedfleet
from fedfleet.algorithms.local import local_training
from fedfleet.simulator.author import Algorithm, BatchPlan, Mean, Message, Objective, Phase, T, View, rng
from fedfleet.simulator.block.side_effects import Impure
from fedfleet.simulator.population import LocalData, Summary
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.losses import cross_entropy
from fedfleet.tasks.options import DataShape, ModelOptions
from tests import refusals

CONFIG = {
    "rounds": 2, "population": {"clients": 20}, "task": {"model": "logistic"}, "executor": {"kind": "local"},
    "evaluation": {"every": 1},
}  # fmt: skip


def algorithm(server=lambda s, d: {"z": T.add(s["z"], d)}, *, init=None, view=None):
    """FedAvg of one's own; ``server(state, mean difference) -> state``."""

    def client_final(shared, client_state, client_input, carry):
        return Message(send={"d": T.sub(carry.z, shared["z"])}), client_state

    phase = Phase(
        name="train", work=local_training(BatchPlan(size=5, steps=2), client_final=client_final), reduce={"d": Mean()}
    )

    def round_(s, rnd):
        shared = Message(send={"z": s["z"]}, config={"lr": {"x": 0.1}})
        return server(s, rnd.map_reduce(phase, shared=shared, cohort=rnd.invite(3))["d"]), {}

    views = {"global": View(view or (lambda s: s["z"]))}
    return Algorithm(init or (lambda z, key, problem: {"z": z}), round_, (phase,), views)


def refused(tmp_path, match, config=CONFIG, **own):
    config = {section: given for section, given in config.items() if section not in own}
    line = refusals.refused(lambda: fedfleet.run(config, out=tmp_path / "run", **own), "", Impure)
    assert re.search(match, line), line
    assert not (tmp_path / "run").exists()


def in_place(s, d):
    for k, p in s["z"]["x"].items():
        p.add_(d["x"][k])
    return s


def put_in(s, d):
    s["z"] = T.add(s["z"], d)
    return s


def put_deep(s, d):
    s["z"]["x"].update(T.add(s["z"], d)["x"])
    return {**s}


@pytest.mark.parametrize(
    ("server", "what"), [(in_place, r"'\S+weight' \(a tensor\)"), (put_in, "'z'"), (put_deep, "'")]
)
def test_a_round_that_changes_its_state_in_place_is_refused(tmp_path, server, what):
    refused(
        tmp_path,
        rf"the algorithm's round changed {what}.* of what it was given in place.*\*\*state",
        algorithm=algorithm(server),
    )


def test_so_are_init_and_the_view(tmp_path):
    def init(z, key, problem):
        for p in z["x"].values():
            p.zero_()
        return {"z": z}

    refused(tmp_path, "the algorithm's init changed", algorithm=algorithm(init=init))

    def view(s):
        for p in s["z"]["x"].values():
            p.mul_(0.5)
        return s["z"]

    refused(tmp_path, "the algorithm's view 'global' changed", algorithm=algorithm(view=view))


def test_the_initial_model_stays_as_it_was(tmp_path):
    """Also where the code that changes it is in the middle of a round, at the first invitation."""

    def round_(s, rnd):
        for p in s["z"]["x"].values():
            p.add_(1.0)
        rnd.invite(3)
        raise AssertionError

    refused(tmp_path, "the algorithm's round changed", algorithm=algorithm()._replace(round=round_))


def test_a_change_after_the_trial_ends_the_run(tmp_path):
    made = algorithm()

    def round_(s, rnd):
        return (in_place if rnd.index == 3 else lambda s, d: s)(*_after(made, s, rnd)), {}

    def _after(made, s, rnd):
        state, _ = made.round(s, rnd)
        return s, T.sub(state["z"], s["z"])

    with pytest.raises(Impure, match="the algorithm's round changed"):
        fedfleet.run({**CONFIG, "rounds": 5}, out=tmp_path / "run", algorithm=made._replace(round=round_))
    found = fedfleet.resume(tmp_path / "run", {"rounds": 3}, algorithm=made._replace(round=round_))
    assert found.summary["rounds"] == 3


def test_cohorts_of_other_sizes_are_on_record(tmp_path):
    made = algorithm()

    def round_(s, rnd):
        rnd.invite(3 if rnd.index < 2 else 5)
        return made.round(s, rnd)

    found = fedfleet.run({**CONFIG, "rounds": 4}, out=tmp_path / "run", algorithm=made._replace(round=round_))
    (event,) = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert event == {"round": 2, "event": "other_cohort", "invited": 5, "cohort.size": 3, "bit_exact": True}
    assert found.summary["bit_exact"]


def by_a_generator():
    generator = torch.Generator().manual_seed(0)
    return lambda: float(torch.rand((), generator=generator))


def by_a_cell():
    n = 0

    def number():
        nonlocal n
        n += 1
        return 1.0 / n

    return number


def by_counting():
    numbers = itertools.count(1)
    return lambda: 1.0 / next(numbers)


def by_the_clock():
    began = time.perf_counter()
    return lambda: time.perf_counter() - began  # its last digits alone are sometimes the same again


DRAWN = {
    "torch": lambda: lambda: float(torch.rand(())),
    "a generator": by_a_generator,
    "numpy": lambda: lambda: float(np.random.rand()),
    "random": lambda: random.random,
    "the clock": by_the_clock,
}
"""Makers of functions whose numbers are others each time."""
ALL = {**DRAWN, "counting": by_counting, "a cell": by_a_cell}


@pytest.mark.parametrize("made", ALL.values(), ids=ALL)
def test_a_server_that_does_not_give_the_same_again_is_refused(tmp_path, made):
    number = made()
    server = algorithm(lambda s, d: {"z": T.add(s["z"], T.scale(number(), d))})
    refused(tmp_path, r"the algorithm's round (changed|does not give the same twice).*draw from keys", algorithm=server)


def test_what_the_round_s_key_draws_is_welcome(tmp_path):
    made = algorithm()

    def round_(s, rnd):
        state, _ = made.round(s, rnd)
        return {"z": T.map(lambda v: v + 0.01 * rng.normal(rnd.key, v.shape), state["z"]), "seen": [rnd.index]}, {}

    fedfleet.run(CONFIG, out=tmp_path / "run", algorithm=made._replace(round=round_))


class Mine(Classification):
    """A net of one's own; ``scale()`` is asked at every evaluation."""

    def __init__(self, net=None, scale=lambda: 1.0):
        super().__init__(ModelOptions(), DataShape((1, 8, 8), 10))
        self._net, self._scale = net or nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), scale
        self.objectives = {"train": Objective(loss=self._loss_of, sign={"x": 1})}
        self.functions = {"predict": lambda z, batch: functional_call(self._net, z["x"], (batch.x,))}

    def init(self, seed):
        return {"x": {name: p.detach().clone() for name, p in self._net.named_parameters()}}

    def _loss_of(self, z, batch, ctx, key):
        return batch.mean(cross_entropy(functional_call(self._net, z["x"], (batch.x,)), batch.y)), {}

    def metrics(self, outputs, data):
        return {"score": float(outputs.mean()) * self._scale()}


@pytest.mark.parametrize("made", ALL.values(), ids=ALL)
def test_metrics_that_are_not_the_same_again_are_refused(tmp_path, made):
    refused(tmp_path, "the task's metrics (changed|does not give the same twice)", task=Mine(scale=made()))


def test_metrics_of_an_example_too(tmp_path):
    task, number = Mine(), random.random
    task.functions["per_example"] = lambda z, batch: {"loss": batch.weight * number()}
    config = {**CONFIG, "evaluation": {"per_client": True}}
    refused(tmp_path, "the task's 'per_example' changed \"random's global", config, task=task)


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.generator = nn.Linear(64, 10), torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.last(x.flatten(1) + torch.rand(64, generator=self.generator))


@pytest.mark.parametrize("inner", ["auto", "serial", "batched", "factored"])
def test_a_net_with_a_generator_is_refused_in_every_way_to_compute(tmp_path, inner):
    config = {**CONFIG, "executor": {"kind": "local", "inner": inner}}
    refused(tmp_path, r"client code changed '(generator|_net)'", config, task=Mine(Drawn()))


@pytest.mark.parametrize("inner", ["auto", "serial"])
def test_statistics_of_a_batch_are_refused_and_of_an_example_are_not(tmp_path, inner):
    def net(layer):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), layer, nn.ReLU(), nn.Linear(8, 10))

    config = {**CONFIG, "task": {}, "executor": {"kind": "local", "inner": inner}}
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    refused(tmp_path, "client code lets rows of weight 0", config, task=Mine(net(norm)))
    fedfleet.run(config, out=tmp_path / "run", task=Mine(net(nn.LayerNorm(8))))


class Clients:
    """Ten clients of four examples; ``noise()`` is added."""

    def __init__(self, noise):
        self.x = rng.normal(rng.key(0), (40, 5))
        self.y, self.noise = (self.x[:, 0] > 0).long(), noise
        self.test = fedfleet.Examples(self.x, self.y, 2)
        self.size = 10

    def summary(self):
        return Summary(4, 4, 4.0)

    def num_examples(self, ids):
        return torch.full_like(ids, 4)

    def domains(self, ids):
        return torch.zeros_like(ids)

    def local_data(self, ids):
        rows = ids[:, None] * 4 + torch.arange(4)
        return LocalData({"x": self.x + self.noise(), "y": self.y}, rows, self.num_examples(ids), self.domains(ids))

    def to(self, device):
        return self


@pytest.mark.parametrize("made", DRAWN.values(), ids=DRAWN)
def test_clients_whose_data_is_not_the_same_again_are_refused(tmp_path, made):
    config = {"rounds": 1, "algorithm": {"batch_size": 2}, "executor": {"kind": "local"}}
    with pytest.raises(fedfleet.ConfigError, match="`local_data` gives a client other examples when asked again"):
        fedfleet.run(config, out=tmp_path / "run", population=Clients(made()))
    fedfleet.run(config, out=tmp_path / "run", population=Clients(lambda: 0.0))
