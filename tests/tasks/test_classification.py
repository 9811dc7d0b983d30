"""Classification: models, initialisation, metrics."""

import pytest
import torch

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import Batch
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.models import MODELS, SMALLEST_SIDE, build
from fedfleet.tasks.options import DataShape, ModelOptions


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_gives_one_output_a_class_at_its_smallest_image(model):
    side = SMALLEST_SIDE.get(model, 3)
    net = build(model, (2, side, side), 7, (5,), 0)
    assert net(torch.zeros(3, 2, side, side)).shape == (3, 7)


def test_lenet_relu_never_gives_negative_logits():
    net = build("lenet_relu", (1, 28, 28), 10, (), 0)
    assert net(torch.randn(20, 1, 28, 28)).min().item() >= 0


def test_metrics():
    task = Classification(ModelOptions(model="logistic"), DataShape((4,), 3))
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0], [2.0, 0.0, 0.0]])
    found = task.metrics(logits, {"y": torch.tensor([0, 1, 2, 2])})
    assert found["accuracy"] == 0.75
    assert found["loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 2]))), rel=1e-6
    )


@pytest.mark.parametrize(("name", "shape"), [("nonsense", (1, 8, 8)), ("lenet", (1, 8, 8)), ("cnn", (64,))])
def test_models_that_cannot_be_built_say_why(name, shape):
    with pytest.raises(ValueError, match=name):
        build(name, shape, 10, (), 0)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_head_is_the_last_layer_of_all_or_none(model):
    """Where a net has one, it is applied to the features, and gives what the net gives."""
    shape = (1, 28, 28)
    made = Classification(ModelOptions(model=model, hidden=(5,)), DataShape(shape, 10))
    assert bool(made.leaves["head"]) == (model != "lenet_relu")  # which ends in a ReLU
    if not made.leaves["head"]:
        assert "features" not in made.functions
        return
    z, batch = made.init(0), Batch({"x": torch.randn(4, *shape), "y": torch.arange(4)}, torch.ones(4))
    weight, bias = (next(z["x"][n] for n in made.leaves["head"] if n.endswith(end)) for end in ("weight", "bias"))
    out = made.functions["features"](z, batch) @ weight.T + bias
    torch.testing.assert_close(out, made.functions["predict"](z, batch), rtol=1e-4, atol=1e-5)


def test_zero_is_where_a_linear_net_may_begin_and_no_other():
    task = Classification(ModelOptions(model="logistic", init="zero"), DataShape((4,), 3))
    assert all(leaf.abs().max() == 0 and leaf.shape[0] == 3 for leaf in T.leaves(task.init(0)))
    assert T.count(task.init(0)) == 15
    for model, hidden in (("mlp", (5,)), ("cnn", ()), ("cnn_bn", ())):
        with pytest.raises(ValueError, match=f"task.init='zero': task.model='{model}' has hidden layers"):
            Classification(ModelOptions(model=model, hidden=hidden, init="zero"), DataShape((1, 8, 8), 3))
    assert T.count(Classification(ModelOptions(hidden=(), init="zero"), DataShape((4,), 3)).init(0)) == 15


def test_how_far_a_line_is_from_the_origin():
    task = Classification(ModelOptions(model="logistic"), DataShape((2,), 2))
    z = {"x": {"1.weight": torch.tensor([[1.0, 5.0], [4.0, 1.0]]), "1.bias": torch.tensor([3.0, -7.0])}}
    found = task.model_metrics(z)["boundary_distance"]
    assert found == pytest.approx(2.0)  # 3 x1 - 4 x2 - 10 = 0
    nearest = found * torch.tensor([0.6, -0.8])
    assert torch.allclose(*task.logits(z, nearest[None])[0])
    for options, shape in (({}, DataShape((2,), 3)), ({"model": "mlp"}, DataShape((2,), 2)), ({}, DataShape((3,), 2))):
        other = Classification(ModelOptions(**{"model": "logistic", **options}), shape)
        assert other.model_metrics(other.init(0)) == {}
