"""The net with attention: what the classifier is given, who is whose partner, how it begins."""

import pytest
import torch
import torch.nn.functional as F

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.work import Batch
from fedfleet.tasks.attentive import Attentive, AttentiveOptions, Highlighter, next_of_class
from fedfleet.tasks.classification import Classification, ClassificationOptions
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.styles import Change

SHAPE, DIMS = DataShape((1, 8, 8), 10), 5
MODELS = {"cnn": 8, "cnn_bn": 8, "lenet": 16, "lenet_relu": 16, "convnet": 22, "cnn5": 16}
X, Y = rng.normal(rng.key(1), (9, 1, 8, 8)), torch.tensor([0, 1, 2, 0, 1, 0, 3, 9, 1])


def made(model: str = "cnn", **options) -> Attentive:
    shape = DataShape((1, MODELS[model], MODELS[model]), 10)
    return Attentive(AttentiveOptions(model=model, dims=DIMS, **options), shape)


def batch(x=X, y=Y, weight=None) -> Batch:
    return Batch({"x": x, "y": y}, torch.ones(len(x)) if weight is None else weight)


def test_attention_is_the_mean_score_of_all_pairs_of_places():
    layer, maps = Highlighter(4, DIMS), rng.normal(rng.key(2), (3, 4, 2, 5))
    q, k = layer.queries(maps).flatten(2), layer.keys(maps).flatten(2)
    q, k = q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)
    for partner in (None, torch.tensor([2, 1, 0])):
        both = q if partner is None else (q + q[partner]) / 2
        attention = (both.mT @ k).mean(1).softmax(1)  # over the places of the query, then of the key
        flat = maps.flatten(2)
        wanted = torch.cat([flat.mean(2), torch.einsum("bcp,bp->bc", flat, attention)], 1)
        torch.testing.assert_close(layer(maps, partner), wanted, rtol=1e-4, atol=1e-5)


def test_a_partner_is_the_next_of_the_class_that_counts():
    real = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1]) > 0
    found = next_of_class(Y, real).tolist()
    assert [j for j, counts in zip(found, real.tolist(), strict=True) if counts] == [5, 4, 2, 8, 0, 6, 7, 1]


def test_what_is_predicted_of_an_example_is_its_own_affair():
    task = made()
    z = task.init(0)
    whole = task.functions["predict"](z, batch())
    each = torch.cat([task.functions["predict"](z, batch(x[None])) for x in X])
    torch.testing.assert_close(whole, each, rtol=1e-5, atol=1e-5)
    p = z["x"]
    maps = X
    for name in ("0", "3"):
        maps = F.max_pool2d(F.conv2d(maps, p[f"{name}.weight"], p[f"{name}.bias"], padding=1).relu(), 2)
    q, k = (
        F.conv2d(maps, p[f"highlight.{n}.weight"], p[f"highlight.{n}.bias"]).flatten(2) for n in ("queries", "keys")
    )
    scores = torch.einsum("bdp,bdr->bpr", q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)).mean(1)
    flat = maps.flatten(2)
    given = torch.cat([flat.mean(2), (flat * scores.softmax(1)[:, None]).sum(2)], 1)
    torch.testing.assert_close(whole, given @ p["7.weight"].T + p["7.bias"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(task.probabilities(whole), whole.exp() / whole.exp().sum(1, keepdim=True))
    scored = task.functions["per_example"](z, batch())
    assert task.metrics(whole, {"y": Y})["loss"] == pytest.approx(float(scored["loss"].mean()), rel=1e-5)
    assert task.metrics(whole, {"y": Y})["accuracy"] == pytest.approx(float(scored["accuracy"].mean()))
    assert scored["accuracy"].tolist() == (whole.argmax(1) == Y).float().tolist()


@pytest.mark.parametrize(
    ("model", "inputs"), [(m, 128 if m in ("convnet", "cnn5") else 64 if "cnn" in m else 32) for m in MODELS]
)
def test_every_net_with_maps_has_an_attentive_one(model, inputs):
    task, side = made(model), MODELS[model]
    z, plain = task.init(0), Classification(ClassificationOptions(model=model), DataShape((1, side, side), 10)).init(0)
    first = next(n for n, leaf in z["x"].items() if leaf.dim() == 2)
    assert z["x"][first].shape[1] == inputs
    mine = {n: tuple(leaf.shape) for n, leaf in z["x"].items() if not n.startswith(("highlight", first[:2]))}
    assert mine == {n: tuple(plain["x"][n].shape) for n in mine}
    assert {n for n in z["x"] if n.startswith("highlight")} == {
        f"highlight.{n}.{leaf}" for n in ("queries", "keys") for leaf in ("weight", "bias")
    }
    x = rng.normal(rng.key(1), (4, 1, side, side))
    change = Change(1.0, 1.0, 3, 3.0, 0.1, torch.ones(2, task.style_width))
    value, aux = task.objectives["stablefdg"].loss(z, batch(x, Y[:4]), change._asdict(), rng.key(0))
    assert value.isfinite()
    assert (bool(aux), task.functions["predict"](z, batch(x, Y[:4])).shape) == (model == "cnn_bn", (4, 10))
    assert torch.equal(task.logits(z, (x * 9).to(torch.int64)), task.logits(z, (x * 9).to(torch.int64).float()))


def test_without_attention_it_is_the_plain_net():
    plain, task = Classification(ClassificationOptions(model="cnn_bn"), SHAPE), made("cnn_bn", attention=False)
    z, wanted = task.init(4), plain.init(4)
    assert all(torch.equal(a, b) for a, b in zip(T.leaves(z), T.leaves(wanted), strict=True))
    assert torch.equal(task.logits(z, X), plain.logits(z, X))


def test_layers_begin_with_draws_of_their_own():
    x = made().init(1)["x"]
    first, queries = x["0.weight"].flatten() * 3, x["highlight.queries.weight"].flatten() * 32**0.5
    n = min(len(first), len(queries))
    assert abs(float(torch.corrcoef(torch.stack([first[:n], queries[:n]]))[0, 1])) < 0.5


def test_styles_are_of_the_first_block_as_it_is_outside_training():
    task = made("cnn_bn")
    z = task.init(0)
    p, b = z["x"], {n: leaf + 0.5 for n, leaf in z["b"].items()}
    h = F.conv2d(X, p["0.weight"], p["0.bias"], padding=1)
    h = F.batch_norm(h, b["1.running_mean"], b["1.running_var"], p["1.weight"], p["1.bias"])
    h = F.max_pool2d(h.relu(), 2).flatten(2)
    found = task.functions["styles"]({"x": p, "b": b}, batch())
    torch.testing.assert_close(found, torch.cat([h.mean(2), (h.var(2) + 1e-6).sqrt()], 1))
    assert found.shape[1] == task.style_width == 32


def test_statistics_of_layers_are_of_the_copies_too():
    """Of the second block's they count where they were made; the first comes before them."""
    task = made("cnn_bn")
    z, change = task.init(0), Change(0.0, 1.0, 4, 3.0, 0.1, torch.zeros(2, 32))
    key = rng.key(2)
    with_, without = (
        task.objectives["stablefdg"].loss(z, batch(), change._replace(explore=e)._asdict(), key)[1]["b"]
        for e in (1.0, 0.0)
    )
    plain = task.objectives["train"].loss(z, batch(), None, key)[1]["b"]
    assert all(torch.equal(plain[n], leaf) for n, leaf in without.items())
    assert torch.equal(with_["1.running_mean"], without["1.running_mean"])
    assert float((with_["5.running_mean"] - without["5.running_mean"]).abs().max()) > 1e-3
    garbage = batch(torch.cat([X, X * 1e3]), Y.repeat(2), torch.arange(18).lt(9).float())
    again = task.objectives["stablefdg"].loss(z, garbage, change._asdict(), key)[1]["b"]
    for n, leaf in with_.items():
        torch.testing.assert_close(again[n], leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["mlp", "logistic", "mobilenet_v2"])
def test_nets_without_maps_are_refused(model):
    with pytest.raises(ValueError, match=f"model={model} has no blocks of convolutions"):
        AttentiveOptions(model=model)


def test_a_resnet_is_cut_after_its_four_stages():
    """Styles are shared after the first, and explored after the first three; without attention it is the plain net."""
    shape, x = DataShape((3, 32, 32), 10), rng.normal(rng.key(1), (4, 3, 32, 32))
    given = {"model": "resnet18", "weights": "random"}
    plain = Classification(ClassificationOptions(**given), shape)
    bare, task = (Attentive(AttentiveOptions(**given, attention=of, dims=DIMS), shape) for of in (False, True))
    z, wanted = bare.init(4), plain.init(4)
    assert [*z["x"]] == [*wanted["x"]]
    assert all(torch.equal(a, b) for a, b in zip(T.leaves(z), T.leaves(wanted), strict=True))
    assert torch.equal(bare.logits(z, x), plain.logits(z, x))
    z, net = task.init(4), plain.net().eval()
    assert z["x"]["1.fc.weight"].shape == (10, 1024)
    assert (task.style_width, z["x"]["highlight.queries.weight"].shape) == (128, (DIMS, 512, 1, 1))
    net.load_state_dict({**wanted["x"], **wanted["b"]}, strict=False)
    seen = []
    net.get_submodule("1.layer1").register_forward_hook(lambda layer, given, maps: seen.append(maps.flatten(2)))
    net(x)
    same = {"x": {**wanted["x"], **{n: z["x"][n] for n in z["x"] if "highlight" in n or ".fc" in n}}, "b": wanted["b"]}
    (maps,) = seen
    found = task.functions["styles"](same, batch(x, Y[:4]))
    torch.testing.assert_close(found, torch.cat([maps.mean(2), (maps.var(2) + 1e-6).sqrt()], 1))
    explores = Change(0.0, 1.0, 3, 3.0, 0.1, torch.zeros(2, 128))
    after = []
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        layer = task._net.get_submodule(f"1.{stage}")
        layer.register_forward_hook(lambda layer, given, maps, stage=stage: after.append((stage, len(maps))))
    value, _ = task.objectives["stablefdg"].loss(z, batch(x, Y[:4]), explores._asdict(), rng.key(0))
    assert value.isfinite()
    assert after == [("layer1", 4), ("layer2", 7), ("layer3", 7), ("layer4", 7)]  # with three copies
