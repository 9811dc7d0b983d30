"""Any net with any loss: values against plain PyTorch, what is refused, what is measured."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, r2_score, roc_auc_score
from torch import nn

import fedfleet
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import Batch
from fedfleet.tasks import from_module
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.registry import TASKS
from tests.algorithms.harness import World, build, moved, play
from tests.refusals import all_say
from tests.tasks import own_nets

N, B = 7, 4


def case(name: str) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """A maker, examples, labels or targets, and torch's own loss of the examples one by one."""
    x = rng.normal(rng.key(1), (N, 3))
    number = rng.normal(rng.key(2), (N, 2))
    words = torch.arange(N * 5).view(N, 5) % 7
    image = rng.normal(rng.key(3), (N, 3, 4, 4))
    each = {"reduction": "none"}
    of, yes_no = partial(F.cross_entropy, **each), partial(F.binary_cross_entropy_with_logits, **each)
    pixels = partial(nn.Conv2d, 3, 2, 3, padding=1)
    return {
        "mse": (lambda: nn.Linear(3, 1), x, number[:, 0], lambda o, y: F.mse_loss(o[:, 0], y, **each)),
        "mse of several": (lambda: nn.Linear(3, 2), x, number, lambda o, y: F.mse_loss(o, y, **each).mean(1)),
        "mae": (lambda: nn.Linear(3, 2), x, number, lambda o, y: F.l1_loss(o, y, **each).mean(1)),
        "huber": (lambda: nn.Linear(3, 2), x, 3 * number, lambda o, y: F.huber_loss(o, y, **each).mean(1)),
        "bce_with_logits": (lambda: nn.Linear(3, 2), x, (number > 0).long(), lambda o, y: yes_no(o, y.float()).mean(1)),
        "cross_entropy": (lambda: nn.Linear(3, 4), x, words[:, 0] % 4, lambda o, y: F.cross_entropy(o, y, **each)),
        "cross_entropy of pixels": (pixels, image, (image.sum(1) > 0).long(), lambda o, y: of(o, y).flatten(1).mean(1)),
        "token_cross_entropy": (own_nets.Words, words, (words + 1) % 7, lambda o, y: of(o.movedim(-1, 1), y).mean(1)),
    }[name]


CASES = ["mse", "mse of several", "mae", "huber", "bce_with_logits", "cross_entropy", "cross_entropy of pixels"]
CASES += ["token_cross_entropy"]


def population(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Three clients of 4, 2 and 1 examples."""
    return fedfleet.data.from_arrays(x, target=y, client=[0, 0, 0, 0, 1, 1, 2], test=(x[:2], y[:2])).population


def test_a_net_made_by_a_lambda_is_called_by_its_class():
    assert from_module(lambda: nn.Sequential(nn.Linear(2, 2))).name == "Sequential"


@pytest.mark.parametrize("name", CASES)
def test_fedavg_is_a_loop_of_plain_torch(name, monkeypatch):
    """Two rounds of two of three clients, epochs in minibatches of 2 whose last one is short, weighted by examples."""
    from tests.algorithms.harness import script

    make, x, y, loss = case(name)
    world = World(from_module(make, loss=name.split(" ")[0]), population(x, y))
    script(monkeypatch, [[0, 2], [1, 2]])
    algorithm = build("fedavg", world.task, lr=0.3, batch_size=4, epochs=2)  # one batch an epoch: whatever the order
    states = play(algorithm, world, 2, inner="batched")
    torch.manual_seed(0)
    net = make()
    held = [range(4), range(4, 6), range(6, 7)]
    for state, cohort in zip(states, ([0, 2], [1, 2]), strict=True):
        start, total = {k: v.clone() for k, v in net.state_dict().items()}, {}
        for client in cohort:
            net.load_state_dict(start)
            rows = list(held[client])
            for _ in range(2):
                net.zero_grad()
                loss(net(x[rows]), y[rows]).mean().backward()
                with torch.no_grad():
                    for p in net.parameters():
                        p -= 0.3 * p.grad
            share = len(rows) / sum(len(held[c]) for c in cohort)
            for k, v in net.state_dict().items():
                total[k] = total.get(k, 0) + share * v
        net.load_state_dict(total)
        assert state["x"].keys() == total.keys()
        for k, v in state["x"].items():
            torch.testing.assert_close(v, total[k], rtol=1e-4, atol=1e-6, msg=k)


@pytest.mark.parametrize("name", CASES)
def test_many_at_once_are_one_at_a_time_in_short_batches(name):
    make, x, y, _ = case(name)
    world = World(from_module(make, loss=name.split(" ")[0]), population(x, y))
    algorithm = build("fedavg", world.task, lr=0.2, batch_size=3, epochs=2)
    serial, batched, factored = (
        play(algorithm, world, 2, inner=inner)[-1] for inner in ("serial", "batched", "factored")
    )
    assert moved(serial, batched) < 1e-5
    assert moved(serial, factored) < 1e-5
    assert moved(world.task.init(0), serial) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_padding_changes_neither_loss_nor_gradient(name):
    make, x, y, loss = case(name)
    task = from_module(make, loss=name.split(" ")[0])
    z = task.init(3)
    weight = torch.tensor([1.0, 1, 0, 1, 0, 1, 0])
    real = weight > 0
    value, aux = task.objectives["train"].loss(z, Batch({"x": x, "y": y}, weight), None, rng.key(0))
    other = torch.where(real.view(-1, *(1 for _ in x.shape[1:])), x, x.flip(0))
    again, _ = task.objectives["train"].loss(z, Batch({"x": other, "y": y}, weight), None, rng.key(0))
    torch.manual_seed(3)
    net = make()
    each = loss(net(x), y)
    torch.testing.assert_close(value, each[real].mean())
    torch.testing.assert_close(value, again)
    assert aux == {}
    batch = Batch({"x": x, "y": y}, torch.ones(N))
    torch.testing.assert_close(task.functions["per_example"](z, batch)["loss"], each)
    outputs = task.functions["predict"](z, batch)
    assert task.metrics(outputs, {"y": y})["loss"] == pytest.approx(each.mean().item(), rel=1e-5)


def test_labels_of_minus_100_count_for_nothing():
    words, y = torch.arange(10).view(2, 5) % 7, torch.tensor([[1, -100, 2, -100, 3], [-100] * 5])
    task = from_module(own_nets.Words, loss="token_cross_entropy")
    z, batch = task.init(0), Batch({"x": words, "y": y}, torch.ones(2))
    outputs = task.functions["predict"](z, batch)
    wanted = F.cross_entropy(outputs[0], y[0], ignore_index=-100)
    found = task.functions["per_example"](z, batch)
    torch.testing.assert_close(found["loss"], torch.stack([wanted, torch.zeros(())]))
    right = (outputs[0].argmax(-1) == y[0])[y[0] >= 0].float().mean()
    assert found["accuracy"].tolist() == [pytest.approx(float(right)), 0]
    assert task.metrics(outputs, {"y": y})["accuracy"] == pytest.approx(float(right))


def test_a_single_label_of_minus_100_counts_for_nothing():
    task = from_module(lambda: nn.Linear(3, 4))
    z, x = task.init(0), rng.normal(rng.key(1), (3, 3))
    y = torch.tensor([2, -100, 1])
    batch = Batch({"x": x, "y": y}, torch.ones(3))
    found, outputs = task.functions["per_example"](z, batch), task.functions["predict"](z, batch)
    torch.testing.assert_close(found["loss"], F.cross_entropy(outputs, y, reduction="none"))
    assert found["loss"][1] == 0
    counted = (outputs.argmax(1) == y)[[0, 2]].double().mean()
    assert task.metrics(outputs, {"y": y})["accuracy"] == pytest.approx(float(counted))


def test_what_draws_in_training_draws_from_the_key_of_the_step():
    task = from_module(lambda: own_nets.Normed(3))
    z, batch = task.init(0), Batch({"x": rng.normal(rng.key(1), (N, 64)), "y": torch.arange(N) % 3}, torch.ones(N))
    one, same, other = (task.objectives["train"].loss(z, batch, None, rng.key(k)) for k in (1, 1, 2))
    assert one[0] == same[0] != other[0]
    assert set(one[1]["b"]) == {"norm.running_mean", "norm.running_var"}
    assert not torch.equal(one[1]["b"]["norm.running_mean"], z["b"]["norm.running_mean"])


def test_initial_weights_are_a_function_of_the_seed_or_those_of_the_net():
    made = from_module(lambda: nn.Linear(3, 1))
    torch.manual_seed(5)
    wanted = nn.Linear(3, 1)
    before = torch.get_rng_state()
    for seed, same in ((5, True), (6, False)):
        assert torch.equal(made.init(seed)["x"]["weight"], wanted.weight) == same
    assert torch.equal(before, torch.get_rng_state())
    given = from_module(wanted)
    with torch.no_grad():
        kept = wanted.weight.clone()
        wanted.weight.zero_()
    assert torch.equal(given.init(1)["x"]["weight"], kept)  # as it was when the task was made of it
    given.init(1)["x"]["weight"].zero_()
    assert torch.equal(given.init(1)["x"]["weight"], kept)
    told = []
    from_module(lambda seed: told.append(seed) or nn.Linear(3, 1)).init(4)
    assert told == [0, 4]


def test_what_is_not_learnt_is_no_part_of_the_model():
    task = from_module(lambda: own_nets.Normed(3), loss="cross_entropy")
    z = task.init(2)
    assert set(z["x"]) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert set(z["b"]) == {"norm.running_mean", "norm.running_var"}
    assert task.leaves["norm"] == {"norm.weight", "norm.bias"}
    x = rng.normal(rng.key(0), (5, 64))
    net = task.net().eval()
    net.load_state_dict({**z["x"], **z["b"]}, strict=False)
    torch.testing.assert_close(task.outputs(z, x), net(x))


def test_shared_weights_are_one():
    task = from_module(lambda: own_nets.Tied(3))
    z = task.init(0)
    assert set(z["x"]) == {"out.weight", "out.bias", "a.weight", "a.bias", "b.weight"}
    x = rng.normal(rng.key(0), (5, 64))
    torch.manual_seed(0)
    torch.testing.assert_close(task.outputs(z, x), own_nets.Tied(3)(x))
    grad = torch.func.grad(lambda p: task.outputs({"x": p}, x).sum())(z["x"])
    torch.manual_seed(0)
    net = own_nets.Tied(3)
    torch.testing.assert_close(grad["b.weight"], torch.autograd.grad(net(x).sum(), net.b.weight)[0])


def test_metrics_are_scikit_learns():
    random = np.random.default_rng(0)
    logits, y = torch.tensor(random.normal(size=(40, 3))), torch.tensor(random.integers(0, 3, 40))
    found = from_module(lambda: nn.Linear(1, 3), metrics=["f1", "auc", "accuracy"]).metrics(logits, {"y": y})
    likely = logits.softmax(1)
    assert found["f1"] == pytest.approx(f1_score(y, logits.argmax(1), average="macro"))
    assert found["auc"] == pytest.approx(roc_auc_score(y, likely, multi_class="ovr"))
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert list(found) == ["f1", "auc", "accuracy", "loss"]
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, y)))
    two = from_module(lambda: nn.Linear(1, 2), metrics=["auc"]).metrics(logits[:, :2], {"y": y.clamp(max=1)})
    assert two["auc"] == pytest.approx(roc_auc_score(y.clamp(max=1), logits[:, 1] - logits[:, 0]))
    several = (logits > 0.3).long()
    task = from_module(lambda: nn.Linear(1, 3), loss="bce_with_logits", metrics=["f1", "auc", "accuracy"])
    mixed = logits + torch.tensor(random.normal(size=(40, 3)))
    found = task.metrics(mixed, {"y": several})
    assert found["f1"] == pytest.approx(f1_score(several, mixed > 0, average="macro"))
    assert found["auc"] == pytest.approx(roc_auc_score(several, mixed))
    assert found["accuracy"] == pytest.approx(float(((mixed > 0) == several.bool()).double().mean()))
    one = from_module(lambda: nn.Linear(1, 1), loss="bce_with_logits", metrics=["f1", "auc"])
    found = one.metrics(mixed[:, :1], {"y": several[:, 0]})
    assert found["f1"] == pytest.approx(f1_score(several[:, 0], mixed[:, 0] > 0))
    assert found["auc"] == pytest.approx(roc_auc_score(several[:, 0], mixed[:, 0]))
    assert math.isnan(one.metrics(mixed[:3, :1], {"y": torch.ones(3)})["auc"])
    numbers = from_module(lambda: nn.Linear(1, 3), loss="mse", metrics=["mse", "rmse", "mae", "r2"])
    found = numbers.metrics(mixed, {"y": logits})
    assert found["mse"] == pytest.approx(float((mixed - logits).square().mean()))
    assert found["rmse"] == pytest.approx(math.sqrt(found["mse"]))
    assert found["mae"] == pytest.approx(float((mixed - logits).abs().mean()))
    assert found["r2"] == pytest.approx(r2_score(logits, mixed))


def test_losses_and_metrics_of_ones_own():
    task = from_module(
        own_nets.plain, loss=own_nets.halved, metrics={"worst_error": own_nets.worst, "mae": own_nets.worst}
    )
    outputs, y = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 5.0])
    assert task.metrics(outputs, {"y": y}) == {"worst_error": 2.0, "mae": 2.0, "loss": 1.25}
    named = from_module(own_nets.plain, loss=own_nets.halved, metrics=["mae", own_nets.worst])
    assert named.metrics(outputs, {"y": y}) == {"mae": 1.5, "worst": 2.0, "loss": 1.25}
    of_classes = torch.tensor([0.2, 3.0])  # of float32, as whoever weights classes has them
    weighted = from_module(lambda: nn.Linear(2, 2), loss=nn.CrossEntropyLoss(weight=of_classes, reduction="none"))
    found, y = torch.tensor([[2.0, 0.0], [0.5, 1.0], [0.0, 3.0]]), torch.tensor([0, 1, 0])
    told = weighted.metrics(found, {"y": y})
    assert told["loss"] == pytest.approx(float(F.cross_entropy(found, y, weight=of_classes, reduction="none").mean()))
    labels = from_module(
        lambda: nn.Linear(3, 2), loss=lambda o, y: F.cross_entropy(o, y, reduction="none"), metrics=["accuracy"]
    )
    found = labels.metrics(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), {"y": torch.tensor([0, 1])})
    assert found["accuracy"] == 0.5


def test_what_cannot_be_is_refused(subtests):
    rows = [
        ({"net": 3}, "from_module: net=3"), ({"loss": "mse_loss"}, "loss='mse_loss': unknown; did you mean 'mse'?"),
        ({"loss": 3}, "loss=3: unknown; choose one of cross_entropy"),
        ({"metrics": ["acuracy"]},
         "metrics='acuracy': none that goes with loss=cross_entropy; did you mean 'accuracy'?"),
        ({"loss": "mse", "metrics": "accuracy"},
         "metrics='accuracy': none that goes with loss=mse; choose among mse, rmse"),
        ({"metrics": ["f1", "f1"]}, "metrics: 'f1' is there twice"),
        ({"metrics": [3]}, "metrics=3: give a name or a function"),
        ({"net": lambda: 3}, "net <lambda>: <lambda> returned a int"),
        ({"net": lambda depth: 3},
         "net <lambda>: <lambda> needs 'depth': give a function that makes it, lambda: <lambda>(depth=…)"),
        ({"net": nn.ReLU()}, "net ReLU: it has no parameters to learn"),
        ({"net": nn.LazyLinear(3)}, "net LazyLinear: 'weight' has no shape yet"),
        ({"net": lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False))},
         "net <lambda>: '1.running_mean' has no shape yet"),
        ({"net": torch.jit.script(nn.Linear(3, 1))}, "net RecursiveScriptModule: it is compiled by torch.jit"),
        ({"net": own_nets.InOneMemory}, "net InOneMemory: last.weight lies in the memory of layer.weight"),
        ({"net": own_nets.InOneMemory(10)}, "net InOneMemory: last.weight lies in the memory of layer.weight"),
        ({"loss": own_nets.Weighing()}, "loss=Weighing: it has parameters, which no client would learn"),
    ]  # fmt: skip
    all_say(subtests, lambda given: from_module(**{"net": own_nets.plain, **given}), rows)


def test_a_task_by_configuration_is_that_of_python():
    entry = TASKS["module"]
    options = entry.options(model="tests.tasks.own_nets:plain", arguments={"out": 2}, loss="mse", metrics=["r2"])
    one = entry.build(options, DataShape((3,), 0))
    two = from_module(lambda: own_nets.plain(2), loss="mse", metrics=["r2"])
    assert all(torch.equal(a, b) for a, b in zip(T.leaves(one.init(3)), T.leaves(two.init(3)), strict=True))
    outputs, y = torch.ones(4, 2), torch.arange(8.0).view(4, 2)
    assert one.metrics(outputs, {"y": y}) == two.metrics(outputs, {"y": y})
    assert list(one.metrics(outputs, {"y": y})) == ["r2", "loss"]
