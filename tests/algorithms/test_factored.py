"""Factored weights: which stay so, and what becomes of those that do not."""

from collections import Counter

import pytest
import torch
from cases import CASES, MODEL
from cases import INVITE as PRESCRIBED
from harness import World, as_asked, build, digits, flat, records

from fedfleet.algorithms.options import CohortOptions
from fedfleet.config.population import problem
from fedfleet.simulator.algorithm import Problem
from fedfleet.simulator.arithmetic import layers
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.combination import Combination, Tape
from fedfleet.simulator.arithmetic.factored import Ledger, Notes
from fedfleet.simulator.block import gradient
from fedfleet.simulator.block.block import Setup
from fedfleet.simulator.block.client import ClientProgram
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.driver import probe as trying
from fedfleet.simulator.driver.probe import probe
from fedfleet.simulator.work import Batch, Objective
from tests.parts import slow_but


def cohort(name: str) -> CohortOptions:
    return CohortOptions(size=PRESCRIBED.get(name, 8))


def world(task: str, model: str) -> World:
    """Clients of very different sizes, in double precision."""
    net = {"hidden": (12, 9)} if task in ("domain_adaptation", "two_heads") else {"model": model, "hidden": (12, 9)}
    return digits(task, "quantity_skew", net=net, dtype=torch.float64, alpha=1.0, min_size=2)


def test_a_weight_may_have_a_higher_rank_where_it_is_used_for_the_last_time(monkeypatch):
    seen = []

    def watched(content, *, last):
        seen.append(last)
        return layers.pays(content, last=last)

    monkeypatch.setattr(gradient, "pays", watched)
    where = world("classification", "logistic")
    z = T.map(torch.Tensor.double, where.task.init(0))
    list(records(build("fedavg", where.task, cohort("fedavg"), steps=3), where, 1, z=z, inner="factored"))
    assert seen
    assert seen == [False, False, True] * (len(seen) // 3)
    weight = torch.zeros(4, 6)
    for rank, last, held in [(2, False, True), (3, False, False), (4, True, True), (5, True, False)]:
        tape = Tape(None)
        outer = tape.append(torch.zeros(1, rank, 6), torch.zeros(1, rank, 4), None)
        assert layers.pays(Combination(1, weight, [(outer, 1.0)]), last=last) == held


OWN = "add with a tensor of each client's own"
STANDS_IN_THE_WAY = {
    **{"fedopt": "mul", "qffl": "mul", "scaffold": OWN, "codasca": OWN, "fedmm": OWN, "gt_gda": OWN, "gt_hsgd": OWN},
    **{
        "feddyn": f"sub {OWN[4:]}",
        "fedawe": OWN,
        "amplified_scaffold": OWN,
        "fedlaavg": f"sub {OWN[4:]}",
        "fact": OWN,
        "mcd": OWN,
        "m3sda": OWN,
        "kd3a": OWN,
        "fedka": OWN,
        "fada": OWN,
        "ditto": OWN,
        "fedsam": "mul",
        "mofedsam": "mul",
        "fedas": "mul",
    },
    "fedga": "linear with a tensor of each client's own",  # it measures what it has trained
}
KEPT = {"fedper": {"x.5.weight"}, "fedrep": {"x.5.weight"}, "lg_fedavg": {"x.1.weight", "x.3.weight"}}
KEPT["fedpac"] = KEPT["fedper"] | KEPT["lg_fedavg"]  # it looks at the features of a body that it has trained
"""Adam squares the gradient, q-FFL its update; the others add what is a client's own: control variate, dual, tracker, momentum."""
BESIDE = {
    "discord",
    "idd",
    "residual",
    "invariant",
    "near",
    "aligned",
    "distil",
    "mkmmd",
    "voted",
    "identify",
    "confuse",
    "pulled",
}
"""Objectives that algorithms have beside the one that they are mostly about."""
TABLES = {"fedsr": {"p.mu", "p.sigma"}}
"""What a client keeps by class, of which a loss takes the row of each example."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in MODEL])
def test_the_weights_stay_factored_unless_the_algorithm_needs_them_multiplied_out(name):
    task, options = CASES[name]
    where = world(task, "mlp")
    z = T.map(torch.Tensor.double, where.task.init(0))
    algorithm = build(name, where.task, cohort(name), **options)
    where = as_asked(algorithm, where)
    setup = Setup.of(algorithm, where.task, where.population, "serial")
    people = where.population
    notes = probe(algorithm, z, problem(people), setup)
    weights = {path for path, leaf in T.named_leaves(z) if leaf.dim() == 2}
    assert set(notes.dense) == set(notes.products)
    assert set().union(*notes.dense.values()) == TABLES.get(name, set())  # the losses only use weights in layers
    of = {path: leaf.numel() for path, leaf in T.named_leaves(z) if path in weights}
    twice = of["head.0.weight"] if name == "mcd" else 0  # it trains both heads
    twice = sum(of.values()) if name == "m3sda" else twice  # and passes sources and target by themselves
    if name == "fada":  # labels ask no adversary
        twice = -sum(n for path, n in of.items() if path.startswith("y."))
    (trained,) = notes.products.keys() - BESIDE
    assert notes.products[trained] == sum(of.values()) + twice
    if name in STANDS_IN_THE_WAY:
        assert all(STANDS_IN_THE_WAY[name] in notes.reasons[path] for path in weights)
    else:
        assert weights & set(notes.reasons) == KEPT.get(name, set())


def test_a_trial_learns_of_few_steps_what_all_would_take(monkeypatch):
    """First and last steps may do less, as CDMA's and Mime's do, and phases differ in length."""
    step, done = ClientProgram._step, Counter()
    monkeypatch.setattr(ClientProgram, "_step", lambda *given: done.update([trying.STEPS]) or step(*given))
    for name in ("fedavg", "cdma_ada", "mime"):
        task, options = CASES[name]
        where = world(task, "mlp")
        z = T.map(torch.Tensor.double, where.task.init(0))
        algorithm = build(name, where.task, cohort(name), **{**options, "epochs": None, "steps": 9})
        setup, notes = Setup.of(algorithm, where.task, where.population, "serial"), []
        for steps in (4, None):
            monkeypatch.setattr(trying, "STEPS", steps)
            notes.append(vars(probe(algorithm, z, problem(where.population), setup)))
            del notes[-1]["sent"]
        assert notes[0] == notes[1], name
    assert 0 < done[4] < done[None]


def penalised(z, batch, ctx, key):
    value = torch.nn.functional.linear(batch.x.flatten(1), z["x"]["w"]).square().mean(1)
    return batch.mean(value) + 0.1 * (z["x"]["w"] ** 2).sum(), {}


def test_a_weight_that_the_loss_also_uses_otherwise_is_not_factored_and_the_gradient_is_right():
    objective = Objective(loss=penalised, sign={"x": 1})
    z = {"x": {"w": torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}}
    x = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    notes = Notes()

    def one(x):
        ops = EngineOps({"train": objective}, {}, Ledger(4, notes))
        return ops.grad("train", z, Batch({"x": x}, torch.ones(6)), torch.tensor(0))[0]["x"]["w"]

    found = torch.func.vmap(one)(x)
    expected = torch.stack([2 * z["x"]["w"] @ c.T @ c / 18 + 0.2 * z["x"]["w"] for c in x])
    torch.testing.assert_close(found, expected)
    assert notes.dense == {"train": {"x.w"}}
    assert notes.reasons == {"x.w": {"pow in the loss"}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_numbers_of_clients_are_as_fine_as_the_leaf(dtype):
    """In double precision 3 * g / n of a factored gradient is that, where n is a float32 or an integer."""
    objective = Objective(
        loss=lambda z, b, ctx, key: (b.mean(torch.nn.functional.linear(b.x, z["x"]["w"]).sum(1)), {}), sign={"x": 1}
    )
    z = {"x": {"w": torch.zeros(2, 5, dtype=torch.float64)}}
    x, n = torch.rand(3, 4, 5, dtype=torch.float64), torch.tensor([3, 7, 11], dtype=dtype)

    def one(x, n):
        ops = EngineOps({"train": objective}, {}, Ledger(3, Notes()))
        g = ops.grad("train", z, Batch({"x": x}, torch.ones(4)), torch.tensor(0))[0]["x"]["w"]
        return ((0.3 * g) / n + (0.3 * g) * (1 / n)).multiplied_out("test")

    share = 0.3 / n.double() + 0.3 * (1 / n).double()
    want = share[:, None, None] * x.mean(1)[:, None].expand(3, 2, 5)
    torch.testing.assert_close(torch.func.vmap(one)(x, n), want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("view", ["T", "mT", "H", "real"])
def test_a_view_of_a_weight_is_another_use_of_it(view):
    def loss(z, batch, ctx, key):
        w = getattr(z["x"]["w"], view)
        return batch.mean((batch.x @ (w if w.shape[0] == 5 else w.T)).square().sum(1)), {}

    z = {"x": {"w": torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}}
    x = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    notes = Notes()

    def one(x):
        ops = EngineOps({"train": Objective(loss=loss, sign={"x": 1})}, {}, Ledger(4, notes))
        first = ops.grad("train", z, Batch({"x": x}, torch.ones(6)), torch.tensor(0))[0]
        w = z["x"]["w"] - first["x"]["w"]
        plain = EngineOps({"train": Objective(loss=linear, sign={"x": 1})}, {}, Ledger(4, Notes()))
        g = plain.grad("train", {"x": {"w": w}}, Batch({"x": x}, torch.ones(6)), torch.tensor(0))[0]["x"]["w"]
        return first["x"]["w"], getattr(g, view) + 0  # the second is a factored leaf of client code

    def linear(z, batch, ctx, key):
        return batch.mean(torch.nn.functional.linear(batch.x, z["x"]["w"]).square().sum(1)), {}

    found, after = torch.func.vmap(one)(x)
    w = z["x"]["w"]
    gradient = torch.stack([2 * w @ c.T @ c / 6 for c in x])
    torch.testing.assert_close(found, gradient)
    moved = torch.stack([2 * (w - f) @ c.T @ c / 6 for f, c in zip(found, x, strict=True)])
    torch.testing.assert_close(after, moved.mT if view in ("T", "mT", "H") else moved)
    assert "w" in str(notes.dense)


@pytest.mark.parametrize(
    "name", slow_but([name for name, (task, _) in CASES.items() if task == "auc"], "cdma_ada", "cdma_one", "afl")
)
def test_robust_training_is_exact_and_uses_its_weights_in_layers_alone(name):
    where = world("robust", "mlp")
    z = T.map(torch.Tensor.double, where.task.init(0))
    algorithm = build(name, where.task, cohort(name), **CASES[name][1])
    one, many = (
        [flat(algorithm.views["global"].params(r.state)) for r in records(algorithm, where, 2, z=z, inner=inner)]
        for inner in ("serial", "factored")
    )
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    setup = Setup.of(algorithm, where.task, where.population, "serial")
    assert probe(algorithm, z, Problem(30, 40.0, where.population.num_examples), setup).dense == {"train": set()}
