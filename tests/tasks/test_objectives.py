"""Objectives of every registered task: who descends and who ascends, and what they say of single examples."""

import pytest
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import Batch
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS

SIGNS = {
    "classification": {**{"train": {"x": 1}, "shifted": {"x": 1, "shift": -1}},
     **{"balanced": {"x": 1}, "residual": {"p": 1}, "near": {"x": 1}, "aligned": {"x": 1}},
     **{"invariant": {"x": 1}, "irm": {"x": 1}, "coral": {"x": 1}, "mmd": {"x": 1}, "fishr": {"x": 1}}},
    "stochastic": {"train": {"x": 1}, "fedsr": {"x": 1, "p": 1}},
    "attentive": {"train": {"x": 1}, "stablefdg": {"x": 1}}, "language_model": {"train": {"x": 1}},
    "auc": {"train": {"x": 1, "y": -1}}, "robust": {"train": {"x": 1, "y": -1}}, "gan": {"train": {"x": 1, "y": -1}},
    "domain_adaptation": {"train": {"x": 1, "y": -1}, "shifted": {"x": 1, "y": -1, "shift": -1},
     **{"reversed": {"x": 1, "y": 1}, "mkmmd": {"x": 1}, "voted": {"x": 1}},
     **{"labels": {"x": 1}, "identify": {"y": 1}, "confuse": {"x": 1, "others": 1}, "pulled": {"x": 1}}},
    "module": {"train": {"x": 1}},
    "two_heads": {"train": {"x": 1, "head": 1, "second": 1}, "discord": {"head": 1, "second": 1}, "idd": {"x": 1},
     **{"matched": {"x": 1, "head": 1, "second": 1}, "distil": {"x": 1, "head": 1}}},
}  # fmt: skip


def build(name: str, **options):
    shape = DataShape((20,) if name == "language_model" else (1, 28, 28), 10)
    options = {"model": "tests.tasks.own_nets:mlp"} | options if name == "module" else options
    return TASKS[name].build(TASKS[name].options(**options), shape)


@pytest.mark.parametrize("name", TASKS)
def test_who_descends_and_who_ascends(name):
    found = {objective: dict(o.sign) for objective, o in build(name).objectives.items()}
    assert found == SIGNS[name]


@pytest.mark.parametrize("name", ["classification", "robust"])
def test_of_single_examples(name):
    """Robust training's are of images as the adversary leaves them."""
    made = build(name, hidden=(5,))
    z = T.map(lambda v: rng.normal(rng.key(v.numel()), tuple(v.shape)), made.init(0))
    x, y = rng.normal(rng.key(1), (6, 1, 28, 28)), torch.tensor([3, 1, 4, 1, 5, 9])
    seen = x + z["y"]["perturbation"] if name == "robust" else x
    weight = [z["x"][k] for k in ("1.weight", "1.bias", "3.weight", "3.bias")]
    hidden = (seen.flatten(1) @ weight[0].T + weight[1]).relu()
    logits = hidden @ weight[2].T + weight[3]
    found = made.functions["per_example"](z, Batch({"x": x, "y": y}, torch.ones(6)))
    assert found["accuracy"].tolist() == (logits.max(1).indices == y).float().tolist()
    torch.testing.assert_close(found["loss"], logits.logsumexp(1) - logits[torch.arange(6), y], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "gan"])
def test_initial_weights_are_a_function_of_the_seed_and_torch_is_left_alone(name):
    made, before = build(name), torch.get_rng_state()
    a, b, c = (torch.cat([leaf.flatten() for leaf in T.leaves(made.init(seed))]) for seed in (1, 1, 2))
    assert all(map(torch.equal, (before, a), (torch.get_rng_state(), b)))
    assert not torch.equal(a, c)


SIZES = [
    ("classification", {"model": "logistic", "hidden": ()}, (784,), {"x": 7_850}),
    ("classification", {"model": "mlp", "hidden": (200, 200)}, (1, 28, 28), {"x": 199_210}),
    ("classification", {"model": "lenet", "hidden": ()}, (1, 28, 28), {"x": 44_426}),
    ("classification", {"model": "convnet", "hidden": ()}, (3, 32, 32), {"x": 122_570}),
    ("classification", {"model": "cnn5", "hidden": ()}, (1, 28, 28), {"x": 582_026}),
    ("classification", {"model": "cnn5", "hidden": ()}, (3, 32, 32), {"x": 878_538}),
    ("classification", {"model": "cnn", "hidden": ()}, (1, 8, 8), {"x": 16 * 10 + 32 * 145 + 128 * 10 + 10}),
    ("auc", {"model": "lenet_relu"}, (1, 28, 28), {"x": 44_428, "y": 1}),
    ("auc", {"model": "convnet"}, (3, 32, 32), {"x": 122_572, "y": 1}),
    ("robust", {"model": "mlp", "hidden": (200, 200)}, (1, 28, 28), {"x": 199_210, "y": 784}),
    ("gan", {}, (1, 28, 28), {"x": 6_679_105, "y": 1_102_721}),
    ("gan", {}, (3, 64, 64), {"x": 3_576_704, "y": 2_765_568}),
]  # fmt: skip
"""Of the papers' nets how many numbers are learnt."""


@pytest.mark.parametrize(("name", "options", "shape", "sizes"), SIZES)
def test_parameter_counts(name, options, shape, sizes):
    z = TASKS[name].build(TASKS[name].options(**options), DataShape(shape, 10)).init(0)
    assert {part: T.count(leaves) for part, leaves in z.items()} == sizes
