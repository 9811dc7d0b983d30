"""BatchNorm and Dropout as pure functions, and BatchNorm's statistics in a federation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedfleet
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.errors import ConfigError
from fedfleet.tasks.models import cnn_bn
from fedfleet.tasks.stateful import BatchNorm, Dropout, buffers, called, prepared, trainable
from tests.parts import slow_but

BASE = {
    "rounds": 3, "population": {"clients": 8, "partition": {"kind": "quantity_skew", "alpha": 1.0, "min_size": 5}},
    "task": {"name": "classification", "model": "cnn_bn"},
    "algorithm": {"name": "fedavg", "lr": 0.1, "batch_size": 16, "steps": 3}, "cohort": {"size": 4},
    "executor": {"kind": "local", "inner": "batched"}, "evaluation": {"every": 3},
}  # fmt: skip


def ours(layer: nn.Module) -> nn.Module:
    return prepared(nn.Sequential(copy.deepcopy(layer)))


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.BatchNorm1d(3), (7, 3)), (nn.BatchNorm1d(3, momentum=0.3, eps=0.1), (7, 3, 5)),
    (nn.BatchNorm2d(3, affine=False), (4, 3, 5, 2)),
])  # fmt: skip
def test_batch_norm_is_torchs(layer, shape):
    if layer.affine:
        nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    net, layer = ours(layer), layer.double()
    p, b = ({k: v.double() for k, v in each} for each in (net.named_parameters(), buffers(net).items()))
    for step in range(3):
        x = 2 + 3 * rng.normal(rng.key(step), shape, torch.float64)
        garbage = torch.full((2, *shape[1:]), 1e6, dtype=torch.float64)
        weight = torch.tensor([1.0] * shape[0] + [0.0] * 2)
        found, b = called(net, p, b, torch.cat([x, garbage]), weight=weight, key=rng.key(0))
        torch.testing.assert_close(found[: shape[0]], layer(x), rtol=1e-10, atol=1e-10)
        assert b.keys() == {"0.running_mean", "0.running_var"}
        torch.testing.assert_close(b["0.running_mean"], layer.running_mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(b["0.running_var"], layer.running_var, rtol=1e-10, atol=1e-10)
    layer.eval()
    still, same = called(net, p, b, x)
    torch.testing.assert_close(still, layer(x), rtol=1e-10, atol=1e-10)
    assert same is b


def test_a_batch_without_rows_teaches_nothing():
    net = ours(nn.BatchNorm1d(3))
    p, b = dict(net.named_parameters()), buffers(net)
    x = rng.normal(rng.key(0), (4, 3))
    _, seen = called(net, p, b, x, weight=torch.ones(4), key=rng.key(0))
    _, after = called(net, p, seen, x, weight=torch.zeros(4), key=rng.key(0))
    assert not torch.equal(seen["0.running_mean"], b["0.running_mean"])
    assert all(torch.equal(after[name], seen[name]) for name in seen)


def test_gradients_of_batch_norm_are_torchs():
    layer = nn.BatchNorm2d(3).double()
    net = ours(layer)
    x = rng.normal(rng.key(1), (4, 3, 2, 2), torch.float64)
    p = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
    at = x.clone().requires_grad_()
    found, _ = called(
        net, p, {k: v.double() for k, v in buffers(net).items()}, at, weight=torch.ones(4), key=rng.key(0)
    )
    wanted = x.clone().requires_grad_()
    by = rng.normal(rng.key(2), (4, 3, 2, 2), torch.float64)
    mine = torch.autograd.grad((found * by).sum(), [at, *p.values()])
    theirs = torch.autograd.grad((layer(wanted) * by).sum(), [wanted, layer.weight, layer.bias])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_dropout_draws_from_the_key_and_the_place():
    net = prepared(nn.Sequential(nn.Dropout(0.3), nn.Sequential(nn.Dropout(0.3))))
    assert [net[0]._place, net[1][0]._place] == ["0", "1.0"]
    x = torch.ones(200, 50)
    once = [called(net, {}, {}, x, weight=torch.ones(200), key=rng.key(k))[0] for k in (1, 1, 2)]
    assert torch.equal(once[0], once[1])
    assert not torch.equal(once[0], once[2])
    values = once[0].unique()
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.49]))
    assert float((once[0] > 0).float().mean()) == pytest.approx(0.49, abs=0.02)  # the two layers drop independently
    assert torch.equal(called(net, {}, {}, x)[0], x)
    assert isinstance(net[0], Dropout)


def test_what_cannot_be_carried_says_so():
    for layer in (nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, track_running_stats=False)):
        with pytest.raises(ValueError, match="0: give BatchNorm a momentum, and let it track running statistics"):
            ours(layer)


def test_fedavg_averages_statistics_with_the_weights():
    """Two rounds of two clients, whole sets as batches, against torch's own layers trained one client at a time."""
    given = {"population.clients": 2, "cohort.size": 2, "rounds": 2}
    given |= {
        "algorithm.batch_size": 1000, "algorithm.steps": 2, "population.dataset": {"name": "digits", "classes": [0, 1]},
    }  # fmt: skip
    given |= {"population.partition": {"kind": "quantity_skew", "alpha": 2.0, "min_size": 20}}
    probe = fedfleet.Experiment(fedfleet.load(BASE, {**given, "algorithm.batch_size": 20}))
    size = int(probe.population.num_examples(torch.arange(2)).max())
    x = fedfleet.Experiment(fedfleet.load(BASE, {**given, "algorithm.batch_size": size}))
    states = trained(x)
    net = cnn_bn(tuple(x.evaluation["test"]["x"].shape[1:]), 2, ())
    z = x.task.init(x.config.seed)
    net.load_state_dict({**z["x"], **z["b"]}, strict=False)
    held = x.population.local_data(torch.arange(2))
    counts = held.counts.tolist()
    for state in states:
        ends = []
        for i in range(2):
            mine = copy.deepcopy(net).train()
            rows = held.rows[i, : counts[i]]
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(mine(held.data["x"][rows]), held.data["y"][rows]).backward()
                optimizer.step()
            ends.append(mine.state_dict())
        share = [n / sum(counts) for n in counts]
        mean = {k: share[0] * ends[0][k] + share[1] * ends[1][k] for k in ends[0]}
        net.load_state_dict(mean)
        for name, value in {**state["x"], **state["b"]}.items():
            torch.testing.assert_close(value, mean[name], rtol=1e-4, atol=1e-5, msg=name)
    assert states[0]["b"].keys() == {f"{i}.running_{s}" for i in (1, 5) for s in ("mean", "var")}


def trained(x: fedfleet.Experiment) -> list:
    """Return the model after every round."""
    executor = x.executor()
    executor.start(x.setup())
    try:
        found = simulate(x.algorithm, x.z, x.problem, x.conditions(), executor, x.config.rounds)
        return [x.algorithm.views["global"].params(record.state) for record in found]
    finally:
        executor.close()


@pytest.mark.parametrize("inner", ["batched", "factored"])
@pytest.mark.parametrize("algorithm", slow_but(["fedavg", "fedprox", "fedopt"], "fedprox"))
def test_many_at_once_are_one_at_a_time(algorithm, inner):
    given = {"algorithm": {"name": algorithm, "lr": 0.1, "batch_size": 16, "steps": 3}}
    one, many = (
        trained(fedfleet.Experiment(fedfleet.load(BASE, {**given, "executor.inner": i})))[-1] for i in ("serial", inner)
    )
    for part in ("x", "b"):
        for name, value in one[part].items():
            torch.testing.assert_close(value, many[part][name], rtol=1e-3, atol=1e-4, msg=name)
    start = fedfleet.Experiment(fedfleet.load(BASE)).z["b"]
    assert all(not torch.equal(one["b"][k], v) for k, v in start.items())


def test_blocks_of_any_size_are_the_same_but_for_rounding():
    a, b = (trained(fedfleet.Experiment(fedfleet.load(BASE, {"executor.block_size": n})))[-1] for n in (1, 4))
    for name, value in a["b"].items():
        torch.testing.assert_close(value, b["b"][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_run_keeps_the_statistics_and_goes_on_with_them(tmp_path):
    x = fedfleet.Experiment(fedfleet.load(BASE))
    run = x.run(tmp_path / "whole")
    fedfleet.Experiment(fedfleet.load(BASE, {"rounds": 2})).run(tmp_path / "parted")
    longer = fedfleet.resume(tmp_path / "parted", {"rounds": 3})
    same = [(r.folder / "model.safetensors").read_bytes() for r in (run, longer)]
    assert same[0] == same[1]
    assert b"b.1.running_mean" in same[0]
    assert run.summary["bit_exact"]
    assert run.summary["final"]["eval/accuracy"] > 0.3


@pytest.mark.parametrize("name", ["scaffold", "fedbuff", "qffl"])
def test_algorithms_that_do_not_average_models_refuse(name):
    with pytest.raises(ConfigError, match=f"{name}, whose server does not average models"):
        fedfleet.Experiment(fedfleet.load(BASE, {"algorithm": name}))


def test_a_layer_in_place_of_torchs_has_its_names():
    net = prepared(cnn_bn((1, 8, 8), 3, ()))
    assert isinstance(net[1], BatchNorm)
    assert {k for k, _ in net.named_parameters()} == {k for k, _ in cnn_bn((1, 8, 8), 3, ()).named_parameters()}


class Shared(nn.Module):
    """Layers, of which each name stands for one of a few: under several names it is the same layer, or has the same weights."""

    def __init__(self, makes, names, tied):
        super().__init__()
        layers = [make() for make in makes]
        for at, which in enumerate(names):
            layer = layers[which % len(layers)]
            if tied and at == tied:
                layer = copy.deepcopy(layer)
                layer.weight = layers[which % len(layers)].weight
            setattr(self, f"layer{at}", layer)
        self.names = [f"layer{at}" for at in range(len(names))]

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
        return x


@given(
    st.lists(st.sampled_from([lambda: nn.Linear(3, 3), lambda: nn.BatchNorm1d(3)]), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_a_layer_under_several_names_is_left_as_it_was_and_called_with_what_is_given(makes, names, tied):
    torch.manual_seed(0)
    plain = Shared(makes, names, tied)
    net = prepared(copy.deepcopy(plain))
    held = {id(layer): {**layer._parameters, **layer._buffers} for layer in net.modules()}
    p, b = {k: v + 1 for k, v in trainable(net).items()}, buffers(net)
    x = rng.normal(rng.key(0), (6, 3))
    found, _ = called(net, p, b, x, weight=torch.ones(6), key=rng.key(1))
    for layer in net.modules():
        now = {**layer._parameters, **layer._buffers}
        assert all(now[name] is held[id(layer)][name] for name in now), "a layer keeps what it was given"
    with torch.no_grad():
        for name, value in plain.named_parameters():
            value.copy_(p[name])
    torch.testing.assert_close(found, plain(x), rtol=1e-3, atol=1e-3)
