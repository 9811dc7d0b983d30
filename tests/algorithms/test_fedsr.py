"""FedSR beside a version of its own: a net by hand, autograd, and torch's divergence of two normal distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from harness import World, build, records
from test_personalised import WHERE as PLAIN
from test_personalised import B
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import fedfleet
from fedfleet.algorithms.options import CohortOptions
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.block.batches import schedule
from fedfleet.simulator.driver.simulate import RoundRecord
from fedfleet.simulator.errors import ConfigError
from fedfleet.simulator.fleet.policies import First
from fedfleet.simulator.fleet.responses import Outcome
from fedfleet.simulator.work import Batch, BatchPlan
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS
from tests.parts import slow_but

LR, LATENT, CLASSES = 0.2, 4, 10
Params = dict[str, Tensor]
ENTRY = TASKS["stochastic"]
TASK: Any = ENTRY.build(ENTRY.options(hidden=(8,), latent=LATENT, samples=3), DataShape((1, 8, 8), CLASSES))
WHERE = World(TASK, PLAIN.population)
X, Y = PLAIN.population.data["x"], PLAIN.population.data["y"]
START: Params = {name: p.double() for name, p in TASK.init(0)["x"].items()}
OWN: Params = {
    "mu": torch.zeros(CLASSES, LATENT, dtype=torch.float64),
    "sigma": torch.ones(CLASSES, LATENT, dtype=torch.float64),
    "scale": torch.ones((), dtype=torch.float64),
}


def moments(p: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.relu(x.flatten(1) @ p["encoder.1.weight"].T + p["encoder.1.bias"])
    out = h @ p["encoder.3.weight"].T + p["encoder.3.bias"]
    return out[:, :LATENT], torch.log1p(out[:, LATENT:].exp())


def loss(p: Params, rows: Tensor, key: Tensor, l2r: float, cmi: float) -> Tensor:
    mu, sigma = moments(p, X[rows])
    z = mu + sigma * rng.normal(rng.fold(key, "features"), (len(rows), LATENT), torch.float64)
    own = Normal(p["scale"] * mu, (p["scale"] * sigma).abs())
    of_class = Normal(p["mu"][Y[rows]], F.softplus(p["sigma"])[Y[rows]])
    apart = kl_divergence(own, of_class).sum(1)
    ce = F.cross_entropy(z @ p["head.weight"].T + p["head.bias"], Y[rows])
    return ce + l2r * z.square().sum(1).sqrt().mean() + cmi * apart.mean()


def down(p: Params, of: Callable[[Params], Tensor], lr: float = LR) -> Params:
    at = {name: leaf.clone().requires_grad_() for name, leaf in p.items()}
    found = torch.autograd.grad(of(at), [*at.values()], allow_unused=True, materialize_grads=True)
    return {name: leaf - lr * g for (name, leaf), g in zip(p.items(), found, strict=True)}


def walk(t: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each batch of a client's round, without padding, and the step's key."""
    local = PLAIN.population.local_data(torch.tensor([client]))
    mine = rng.fold(rng.fold(rng.key(0), "client", t, 0), torch.tensor([client]), torch.tensor([0]))
    found = schedule(BatchPlan(size=B, epochs=1), local.rows, local.counts, rng.fold(mine, "stage", 0))
    for rows, weight, key in zip(found.rows[0], found.weight[0], found.key[0], strict=True):
        yield rows[weight > 0], key


def run(name: str = "fedsr", rounds: int = 4, z: Any = None, where: World = WHERE, **options: Any) -> list[RoundRecord]:
    options = {"epochs": 1, "batch_size": B, "lr": LR, "weight": "uniform", **options}
    start = T.map(Tensor.double, TASK.init(0)) if z is None else z
    algorithm = build(name, where.task, CohortOptions(size=5), **options)
    assert algorithm.buffers  # models are averaged, and what their layers count with them
    return list(records(algorithm, where, rounds, z=start, policy=First(3)))


def heard(record: RoundRecord) -> list[int]:
    (phase,) = record.phases
    return phase.clients[phase.responses.outcome == Outcome.COMPLETED].tolist()


def mean(ends: list[Params], weights: list[float]) -> Params:
    return {n: sum(w * e[n] for w, e in zip(weights, ends, strict=True)) / sum(weights) for n in START}


def same(found: Params, wanted: Params) -> None:
    assert found.keys() == START.keys()
    for name, leaf in found.items():
        torch.testing.assert_close(leaf, wanted[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("weight", slow_but(["uniform", "num_examples"], "num_examples"))
def test_rounds_are_those_by_hand(weight):
    z, kept, again = START, dict.fromkeys(range(8), OWN), 0
    for t, record in enumerate(run(l2r=0.3, cmi=0.2, weight=weight, rounds=6, lr_schedule={"kind": "power"})):
        ends = []
        for c in heard(record):
            again += kept[c] is not OWN
            p = {**z, **kept[c]}
            for rows, key in walk(t, c):
                p = down(p, lambda q, r=rows, k=key: loss(q, r, k, 0.3, 0.2), LR * (t + 1) ** -0.5)
            kept[c] = {name: p[name] for name in OWN}
            ends.append(p)
        sizes = PLAIN.population.num_examples(torch.tensor(heard(record))).double().tolist()
        z = mean(ends, sizes if weight == "num_examples" else [1.0] * len(ends))
        same(record.state["x"], z)
    assert again  # what a client keeps was gone on with
    assert all(float((kept[c][n] - OWN[n]).abs().max()) > 1e-2 for c in heard(record) for n in OWN)


def test_without_penalties_it_is_fedavg_of_the_same_net():
    for a, b in zip(run(l2r=0.0, cmi=0.0), run("fedavg"), strict=True):
        same(a.state["x"], b.state.z["x"])


def test_without_penalties_or_deviations_it_is_fedavg_of_a_net_whose_features_are_not_drawn():
    z = {"x": {**START, "encoder.3.bias": START["encoder.3.bias"] - 40.0 * (torch.arange(2 * LATENT) >= LATENT)}}
    p = z["x"]
    for t, record in enumerate(run(z=z, l2r=0.0, cmi=0.0)):
        ends = []
        for c in heard(record):
            q = p
            for rows, _ in walk(t, c):

                def plain(at: Params, rows: Tensor = rows) -> Tensor:
                    features = moments(at, X[rows])[0]
                    return F.cross_entropy(features @ at["head.weight"].T + at["head.bias"], Y[rows])

                q = down(q, plain)
            ends.append(q)
        p = mean(ends, [1.0] * len(ends))
        same(record.state["x"], p)


def test_what_a_client_keeps_does_not_travel():
    floats = T.count(START)
    for record in run(rounds=2):
        counts = record.phases[0].counts
        assert counts["floats_up"] == 3 * floats
        assert counts["floats_down"] == 5 * floats
        assert set(record.state) == {"x"}


def test_a_penalty_alone_is_what_it_says():
    rows, key, none = torch.arange(6), rng.key(5), {"l2r": 0.0, "cmi": 0.0}
    p = {"mu": torch.rand(CLASSES, LATENT).double(), "sigma": torch.randn(CLASSES, LATENT).double()}
    for scale in (0.7, -0.7):  # of the width of a distribution the sign is of no account
        own = {**p, "scale": torch.tensor(scale, dtype=torch.float64)}
        batch = Batch({"x": X[rows], "y": Y[rows]}, torch.ones(6, dtype=torch.float64))
        values = [
            TASK.objectives["fedsr"].loss({"x": START, "p": own}, batch, {**none, **more}, key)[0]
            for more in ({}, {"l2r": 1.0}, {"cmi": 1.0})
        ]
        for i, (l2r, cmi) in enumerate([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]):
            torch.testing.assert_close(values[i], loss({**START, **own}, rows, key, l2r, cmi))
        assert float(values[1] - values[0]) > 0.1
        assert float(values[2] - values[0]) > 0.1


@pytest.mark.parametrize("name", ["omg", "ditto", "fedsam", "scaffold"])
def test_other_algorithms_train_its_net(name):
    of = {"of": {"name": "fedsr", "steps": 2, "batch_size": B}} if name == "omg" else {"steps": 2, "batch_size": B}
    algorithm = build(name, TASK, CohortOptions(size=5), **of)
    *_, last = records(algorithm, WHERE, 2, z=T.map(Tensor.double, TASK.init(0)))
    z = algorithm.views["global"].params(last.state)["x"]
    assert z.keys() == START.keys()
    assert all(float((z[n] - START[n]).abs().max()) > 0 for n in z)
    assert algorithm.name == ("omg" if name == "omg" else None)


def test_with_no_radius_matching_is_fedsr():
    of = {"name": "fedsr", "epochs": 1, "batch_size": B, "lr": LR}
    omg = build("omg", TASK, CohortOptions(size=5), of=of, kappa=1e-9)
    found = list(records(omg, WHERE, 2, z=T.map(Tensor.double, TASK.init(0)), policy=First(3)))
    for a, b in zip(found, run(rounds=2), strict=True):
        for name in START:
            torch.testing.assert_close(a.state["x"][name], b.state["x"][name], rtol=1e-6, atol=1e-8)


BASE: dict[str, Any] = {
    "rounds": 3,
    "population": {"clients": 8, "held_out": 0.25, "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 6}},
    "task": {"name": "stochastic", "hidden": [8], "latent": 4},
    "algorithm": {"name": "fedsr", "steps": 3, "batch_size": 5, "lr": 0.2},
    "cohort": {"size": 4},
    "executor": {"kind": "local"},
    "evaluation": {"every": 3, "per_client": True},
}


def test_both_models_of_a_run_are_measured_alike_in_every_executor(tmp_path):
    tables = []
    for inner in ("serial", "batched", "factored"):
        made = fedfleet.run(BASE, {"executor.inner": inner}, out=tmp_path / inner)
        tables.append(made.table("clients"))
    for other in tables[1:]:
        pd.testing.assert_frame_equal(tables[0], other, rtol=1e-3, atol=1e-3)
    last = tables[0][tables[0]["round"] == 2]
    assert (last["own_loss"] - last["loss"]).abs().max() > 1e-2


def test_a_task_without_drawn_features_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm.name='fedsr': .*: set task.name=stochastic"):
        fedfleet.Experiment(fedfleet.load(BASE, {"task": {"name": "classification"}}))


def test_algorithms_that_cut_the_net_refuse_it():
    with pytest.raises(ConfigError, match=r"algorithm.name='fedper': .*: use task.name=classification"):
        fedfleet.Experiment(fedfleet.load(BASE, {"algorithm": {"name": "fedper", "steps": 1}}))
