"""Domain adaptation: sizes, initial weights, every loss beside its formula written again, who gets which gradient."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.factored import Ledger, Notes
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.work import Batch
from fedfleet.tasks import adaptation_nets, adversaries
from fedfleet.tasks.adaptation import TAKES, AdaptationOptions, DomainAdaptation
from fedfleet.tasks.options import DataShape
from tests.parts import slow_but

KEY = rng.key(5)
SHAPE = DataShape((1, 4, 4), 3)
VARIANTS = {
    "none": {"loss": "none"}, "dann": {"loss": "dann", "nu": 0.7},
    "dann, conv2": {"loss": "dann", "model": "conv2", "hidden": (64, 64, 64)}, "cdan": {"loss": "cdan", "nu": 1.3},
    "cdan, detached": {"loss": "cdan", "cdan_detach": True}, "cdan_e": {"loss": "cdan_e", "nu": 0.7},
    "mdd": {"loss": "mdd", "nu": 0.5},
    "mdd, per domain": {"loss": "mdd", "mdd_margin": 3.0, "mdd_reduction": "per_domain_mean"},
    "mdd, conv2": {"loss": "mdd", "model": "conv2", "hidden": (64, 64, 64)},
    "per sample": {"loss": "dann", "task_weight": "per_sample", "source_share": 0.3},
    "mdd, per sample": {**{"loss": "mdd", "task_weight": "per_sample", "source_share": 0.3},
     "mdd_reduction": "per_domain_mean"},
    "fine-tuned": {"loss": "dann", "nu": 0.25, "fine_tune": True},
}  # fmt: skip


def task(**options):
    return DomainAdaptation(AdaptationOptions(**{"hidden": (6, 5), **options}), SHAPE)


def point(made, seed=1):
    """A point with large weights and biases, in double precision, so that nothing is alike."""
    key = rng.key(seed)
    named = list(T.named_leaves(made.init(seed)))
    drawn = [rng.normal(rng.fold(key, name), tuple(leaf.shape), torch.float64) for name, leaf in named]
    scale = [0.3 if leaf.dim() == 4 else 0.6 for _, leaf in named]
    return T.unflatten(made.init(seed), [s * d for s, d in zip(scale, drawn, strict=True)])


def batch_of(target, seed=0, weight=None):
    """Rows of which those are targets where ``target`` says so."""
    key, n = rng.key(seed), len(target)
    target = torch.tensor(target)
    y = (3 * rng.uniform(rng.fold(key, "y"), n)).long()
    x = rng.normal(rng.fold(key, "x"), (n, *SHAPE.example), torch.float64)
    data = {"x": x, "y": torch.where(target, -1, y), "target": target}
    return Batch(data, torch.ones(n, dtype=torch.float64) if weight is None else weight)


MIXED = [False, True, True, False, False, True, True]
KINDS = {"mixed": MIXED, "source": [False] * 5, "target": [True] * 4}


def direction(made, z, batch, key=KEY):
    return EngineOps(made.objectives, {}).grad("train", z, batch, key)


def value(made, z, batch, key=KEY):
    return made.objectives["train"].loss(z, batch, None, key)[0]


# -- sizes and initial weights
@pytest.mark.parametrize(("loss", "x", "y"), [
    ("dann", 40_880 + 246_410, 235_502), ("cdan", 40_880 + 246_410, 2_352_302), ("cdan_e", 40_880 + 246_410, 2_352_302),
    ("mdd", 40_880 + 512_810, 512_810),
])  # fmt: skip
def test_the_released_codes_sizes(loss, x, y):
    made = DomainAdaptation(AdaptationOptions(model="conv2", loss=loss), DataShape((3, 28, 28), 10))
    z = made.init(0)
    assert {p: T.count(z[p]) for p in z} == {"x": x, "y": y}
    assert (T.count({k: v for k, v in z["x"].items() if k.startswith("features.")}), made.parts) == (40_880, ("x", "y"))
    assert made.unlabelled


def test_other_nets_sizes():
    def counts(**options):
        z = DomainAdaptation(AdaptationOptions(**options), DataShape((3, 28, 28), 10)).init(0)
        return {p: T.count(z[p]) for p in z}

    third, flat = 48 * 64 * 9 + 64, 64 * 7 * 7
    head = flat * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10
    assert counts(model="conv3") == {"x": 40_880 + third + head, "y": flat * 100 + 100 + 100 * 2 + 2}
    mlp = 3 * 784 * 64 + 64 + 2 * (64 * 64 + 64) + 640 + 10
    assert counts() == {"x": mlp, "y": 64 * 32 + 32 + 32 + 1}
    assert counts(loss="cdan") == {"x": mlp, "y": 640 * 32 + 32 + 32 + 1}
    assert (counts(loss="mdd"), counts(loss="none")) == ({"x": mlp, "y": 640 + 10}, {"x": mlp})
    extractor = 3 * 9 * 16 + 16 + 16 * 9 * 32 + 32 + 32 * 49 * 64 + 64
    assert counts(model="cnn") == {"x": extractor + 650, "y": 64 * 64 + 64 + 65}
    assert counts(model="cnn", loss="mdd") == {"x": extractor + 64 * 64 + 64 + 650, "y": 64 * 64 + 64 + 650}
    assert not task(loss="none").unlabelled


def test_initial_weights():
    z = DomainAdaptation(AdaptationOptions(model="conv2"), DataShape((3, 28, 28), 10)).init(0)
    for part in z.values():
        for name, leaf in part.items():
            if name.endswith("bias"):
                assert bool((leaf == 0.1).all())
            else:
                assert float(leaf.abs().max()) <= 0.2
                if leaf.numel() > 10_000:  # of a normal cut at two deviations
                    assert float(leaf.std()) == pytest.approx(0.1 * 0.8796, rel=0.02)
    he = DomainAdaptation(AdaptationOptions(hidden=(300, 200)), DataShape((100,), 10)).init(0)
    for name, width in (("features.1.weight", 100), ("features.3.weight", 300)):
        assert float(he["x"][name].std()) == pytest.approx(math.sqrt(2 / width), rel=0.03)
    assert float(torch.cat([leaf.flatten() for k, leaf in he["x"].items() if "bias" in k]).abs().max()) == 0


@pytest.mark.parametrize("model", ["conv2", "conv3"])
def test_convolutions_keep_the_side_and_pooling_halves_it(model):
    made = DomainAdaptation(AdaptationOptions(model=model), DataShape((2, 9, 8), 3))
    z, x = made.init(0), rng.normal(KEY, (2, 2, 9, 8))
    w = {k.removeprefix("features."): v for k, v in z["x"].items() if k.startswith("features.")}
    h = x
    for k, padding in (("0", 2), ("3", 2), *([("6", 1)] if model == "conv3" else [])):
        h = F.relu(F.conv2d(h, w[f"{k}.weight"], w[f"{k}.bias"], padding=padding))
        h = F.max_pool2d(h, 2) if padding == 2 else h
    torch.testing.assert_close(made.features(z, x), h.flatten(1))
    assert made.functions["predict"](z, Batch({"x": x}, torch.ones(2)))["logits"].shape == (2, 3)


def test_the_extractor_starts_alike_whatever_the_adversary():
    before = torch.get_rng_state()
    found = {loss: task(loss=loss).init(3)["x"] for loss in ("none", "dann", "cdan", "mdd")}
    assert torch.equal(before, torch.get_rng_state())
    for loss in ("dann", "cdan", "mdd"):
        assert all(torch.equal(found["none"][k], found[loss][k]) for k in found["none"])
    assert not torch.equal(found["none"]["head.0.weight"], task(loss="none").init(4)["x"]["head.0.weight"])


# -- the losses, written again
def net(z, part, prefix, h):
    """Linear layers with ReLU between."""
    names = sorted({int(k.removeprefix(prefix).split(".")[0]) for k in z[part] if k.startswith(prefix)})
    for i, k in enumerate(names):
        h = h.clamp(min=0) if i else h
        h = h @ z[part][f"{prefix}{k}.weight"].T + z[part][f"{prefix}{k}.bias"]
    return h


def written(made, z, batch):
    """L_cls - nu L_dom of an mlp without dropout, row by row."""
    o = made._options
    h = net(z, "x", "features.", batch.x.flatten(1)).clamp(min=0)
    logits = net(z, "x", "head.", h)
    p = torch.softmax(logits, 1)
    source = [i for i, t in enumerate(batch.data["target"].tolist()) if not t]
    target = [i for i, t in enumerate(batch.data["target"].tolist()) if t]
    n = len(source) + len(target)
    task_losses = [-torch.log(p[i, batch.y[i]]) for i in source]
    cls = sum(task_losses) / (n * o.source_share if o.task_weight == "per_sample" else max(1, len(source)))
    if o.loss == "none":
        return cls
    if o.loss == "mdd":
        q, label = torch.softmax(net(z, "y", "", h), 1), logits.argmax(1)
        agree = [-torch.log(q[i, label[i]]) * o.mdd_margin for i in source]
        differ = [-torch.log(1.00001 - q[i, label[i]]) for i in target]
        if o.mdd_reduction == "batch_mean":
            dom = (sum(agree) + sum(differ)) / n
        elif o.task_weight == "per_sample":
            dom = sum(agree) / n / o.source_share + sum(differ) / n / (1 - o.source_share)
        else:
            dom = sum(agree) / max(1, len(source)) + sum(differ) / max(1, len(target))
        return cls - o.nu * dom
    if o.loss == "dann":
        given = h
    else:
        given = torch.stack([torch.outer(p[i].detach() if o.cdan_detach else p[i], h[i]).flatten() for i in range(n)])
    is_target = torch.sigmoid(net(z, "y", "", given)[:, 0])
    each = [-torch.log(is_target[i] if i in target else 1 - is_target[i]) for i in range(n)]
    if o.loss != "cdan_e":
        return cls - o.nu * sum(each) / n
    weigh = [1 + torch.exp(sum(p[i, k] * torch.log(p[i, k] + 1e-5) for k in range(3))) for i in range(n)]
    share = {i: weigh[i] / sum(float(weigh[j].detach()) for j in side) for side in (source, target) for i in side}
    return cls - o.nu * sum(share[i] * each[i] for i in range(n)) / sum(float(s.detach()) for s in share.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [n for n in VARIANTS if "conv" not in n and n != "fine-tuned"])
def test_value_and_gradient_are_those_of_the_formula(name, kind):
    made = task(**VARIANTS[name])
    z, batch = point(made), batch_of(KINDS[kind])
    free = T.map(lambda v: v.clone().requires_grad_(), z)
    want = written(made, free, batch)
    found, aux = direction(made, z, batch)
    assert float(aux["loss"]) == pytest.approx(float(torch.as_tensor(want).detach()), rel=1e-9, abs=1e-10)
    wanted = torch.autograd.grad(want, T.leaves(free), allow_unused=True) if torch.is_tensor(want) else [None] * 99
    sign = {"x": 1.0, "y": -1 / made._options.nu}  # the adversary descends its own loss, whatever nu
    gradients = [torch.zeros_like(v) if g is None else g for v, g in zip(T.leaves(z), wanted, strict=False)]
    gradients = T.unflatten(z, gradients)
    for part in made.parts:
        for a, b in zip(T.leaves(found[part]), T.leaves(gradients[part]), strict=True):
            torch.testing.assert_close(a, sign[part] * b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_without_labels_there_is_no_task_loss(name):
    made = task(**VARIANTS[name])
    z, batch = point(made), batch_of([True] * 5)
    cls = made._task_loss(made.logits(z, made.features(z, batch.x)), batch, batch.data["target"])
    assert float(cls) == 0
    found, aux = direction(made, z, batch)
    assert bool(torch.isfinite(torch.cat([leaf.flatten() for leaf in T.leaves(found)])).all())
    assert math.isfinite(float(aux["loss"]))
    head = torch.cat([v.flatten() for k, v in found["x"].items() if k.startswith("head.")])
    reaches_head = name in ("cdan", "cdan_e")
    assert (float(head.abs().max()) > 0) == reaches_head
    features = torch.cat([v.flatten() for k, v in found["x"].items() if k.startswith("features.")])
    assert (float(features.abs().max()) > 0) == (name != "none")


def test_disparity_reaches_no_head_but_its_own():
    made = task(loss="mdd", nu=2.0)
    z, batch = point(made), batch_of(MIXED)
    with_it, _ = direction(made, z, batch)
    without, _ = direction(task(loss="mdd", nu=1e-9, psi_rescale=False), z, batch)
    for k, v in with_it["x"].items():
        if k.startswith("head."):
            torch.testing.assert_close(v, without["x"][k], rtol=1e-7, atol=1e-10)
    assert not torch.allclose(with_it["x"]["features.1.weight"], without["x"]["features.1.weight"])


def test_a_detached_product_gives_the_head_no_gradient_of_the_adversary():
    free, held = task(loss="cdan"), task(loss="cdan", cdan_detach=True)
    z, batch = point(free), batch_of(MIXED)
    assert float(value(free, z, batch)) == float(value(held, z, batch))
    (a, _), (b, _) = direction(free, z, batch), direction(held, z, batch)
    alone, _ = direction(task(loss="none"), {"x": z["x"]}, batch)
    assert torch.equal(a["y"]["0.weight"], b["y"]["0.weight"])
    torch.testing.assert_close(b["x"]["head.0.weight"], alone["x"]["head.0.weight"])
    assert not torch.allclose(a["x"]["head.0.weight"], b["x"]["head.0.weight"])


def test_weights_by_certainty_are_one_of_each_domain():
    judged, logits = (rng.normal(rng.key(s), (7, k), torch.float64) for s, k in ((1, 1), (2, 3)))
    for target in KINDS.values():
        n, at = len(target), torch.tensor(target)
        batch = Batch({}, torch.ones(n, dtype=torch.float64))
        alike = adversaries.cdan_e(torch.full((n, 1), 0.4, dtype=torch.float64), logits[:n], batch, at)
        want = torch.where(at, F.softplus(torch.tensor(-0.4)), F.softplus(torch.tensor(0.4))).double()
        shares = [float(want[at == t].mean()) for t in (False, True) if bool((at == t).any())]
        assert float(alike) == pytest.approx(sum(shares) / len(shares), abs=1e-7)
    sure = adversaries.certainty(torch.tensor([[50.0, 0, 0], [0, 0, 0]], dtype=torch.float64))
    assert sure.tolist() == pytest.approx([2.0, 1 + 1 / 3], abs=1e-4)
    assert float(adversaries.cdan_e(judged, logits, Batch({}, torch.zeros(7).double()), torch.tensor(MIXED))) == 0


def test_a_certain_disparity_is_finite():
    judged = torch.tensor([[200.0, 0.0, 0.0]]).requires_grad_()
    how = {"margin": 1.0, "reduction": "batch_mean"}
    batch, at = Batch({}, torch.ones(1)), torch.tensor([True])
    loss = adversaries.mdd(judged, torch.tensor([[1.0, 0, 0]]), batch, at, **how)
    assert float(loss.detach()) == pytest.approx(-math.log(1e-5), rel=2e-3)
    assert bool(torch.isfinite(torch.autograd.grad(loss, judged)[0]).all())


def test_two_outputs_are_a_softmax_over_domains():
    judged, target = rng.normal(rng.key(3), (7, 2), torch.float64), torch.tensor(MIXED)
    want = F.cross_entropy(judged, target.long(), reduction="none")
    torch.testing.assert_close(adversaries.domain_entropy(judged, target), want)


# -- the two players
@pytest.mark.parametrize(
    ("options", "factor"), [({}, 1.0), ({"psi_rescale": False}, 0.25), ({"fine_tune": True}, None)]
)
def test_the_adversary_steps_along_its_own_loss(options, factor):
    made, plain = task(nu=0.25, **options), task(nu=0.25)
    z, batch = point(made), batch_of(MIXED)
    y = T.map(lambda v: v.clone().requires_grad_(), z["y"])
    features = made.features(z, batch.x)
    judged = made.judged({**z, "y": y}, features, made.logits(z, features))
    own = torch.autograd.grad(adversaries.dann(judged, batch, batch.data["target"]), T.leaves(y))
    found, _ = direction(made, z, batch)
    factor = 0.25 / 0.26 if factor is None else factor
    for a, b in zip(T.leaves(found["y"]), own, strict=True):
        torch.testing.assert_close(a, factor * b)
    usual, _ = direction(plain, z, batch)
    for k, v in found["x"].items():  # fine-tuning slows the extractor down, and not the head
        slow = 0.05 if "fine_tune" in options and k.startswith("features.") else 1.0
        torch.testing.assert_close(v, slow * usual["x"][k])
    assert float(value(made, z, batch)) == pytest.approx(float(value(plain, z, batch)), abs=1e-12)


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("loss", [{"loss": "dann"}, {"loss": "mdd", "mdd_reduction": "per_domain_mean"}])
def test_weighing_by_samples_gives_the_pooled_objective_whoever_holds_what(share, loss):
    made, n = task(task_weight="per_sample", **loss), 8
    everything = batch_of([False] * n + [True] * n)
    cut = int(share * n)
    first = [*range(cut), *range(n, 2 * n - cut)]
    clients = [first, [i for i in range(2 * n) if i not in first]]
    z = point(made)

    def held(rows):
        return Batch({k: v[rows] for k, v in everything.data.items()}, everything.weight[rows])

    mean = sum(float(value(made, z, held(rows))) for rows in clients) / 2
    assert mean == pytest.approx(float(value(made, z, everything)), abs=1e-12)
    pooled = task(**loss)  # all in one place, each domain's mean is that
    assert float(value(pooled, z, everything)) == pytest.approx(mean, abs=1e-12)
    if (
        share == 1 and loss["loss"] == "dann"
    ):  # the released code's: half of the task's loss, against the whole adversary
        uneven = sum(float(value(pooled, z, held(rows))) for rows in clients) / 2
        cls = value(task(loss="none"), {"x": z["x"]}, everything)
        assert uneven == pytest.approx(mean - 0.5 * float(cls), abs=1e-12)


# -- dropout
def test_dropout_is_drawn_from_the_key_in_training_alone():
    shape = DataShape((1, 8, 8), 3)
    made, none = (DomainAdaptation(AdaptationOptions(model="conv2", loss="mdd", dropout=p), shape) for p in (0.5, 0.0))
    z = made.init(0)
    batch = Batch({"x": rng.normal(KEY, (4, 1, 8, 8)), "y": torch.tensor([0, 1, 2, 0])}, torch.ones(4))
    before = torch.get_rng_state()
    a, b, c = (float(value(made, z, batch, rng.key(s))) for s in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert a == b
    assert a != c
    assert torch.equal(*(m.functions["predict"](z, batch)["logits"] for m in (made, none)))


def test_dropout_comes_after_each_hidden_layer_of_both_heads_with_draws_of_its_own():
    nets = adaptation_nets.build("conv2", (1, 8, 8), 3, (), "margin", 0.3, 0)
    for head in (nets.head, nets.adversary):
        assert [type(layer).__name__ for layer in head] == ["Linear", *["ReLU", "Dropout", "Linear"] * 2]
        assert [layer.p for layer in head if hasattr(layer, "p")] == [0.3, 0.3]
    made = DomainAdaptation(AdaptationOptions(model="conv2", loss="mdd"), DataShape((1, 8, 8), 3))
    z = made.init(0)
    z["y"] = {k: z["x"][f"head.{k}"] for k in z["y"]}  # alike but for their draws
    seen = []
    batch = Batch({"x": rng.normal(KEY, (4, 1, 8, 8)), "y": torch.tensor([0, 1, 2, 0])}, torch.ones(4))
    made._domain_loss = lambda judged, logits, batch, target: seen.append((judged, logits)) or judged.sum()
    made.objectives["train"].loss(z, batch, None, KEY)
    assert not torch.allclose(*seen[0])
    for loss in ("dann", "cdan", "none"):
        plain = adaptation_nets.build("conv2", (1, 8, 8), 3, (), TAKES[loss], 0.3, 0)
        assert not any(type(layer).__name__ == "Dropout" for net in plain if net for layer in net.modules())


# -- execution
@pytest.mark.parametrize("name", slow_but(VARIANTS, "none", "cdan_e", "mdd, conv2", "mdd, per sample"))
@given(
    seed=st.integers(0, 10**6), rows=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=7),
    pure=st.sampled_from([None, False, True]), size=st.sampled_from([0.0, 1.0, 1e3]),
)  # fmt: skip
def test_many_clients_at_once_and_garbage_in_padded_rows(name, seed, rows, pure, size):
    """Serial, batched and factored agree; what stands in rows of weight 0 changes nothing."""
    made = task(**VARIANTS[name])
    target = [t if pure is None else pure for t, _ in rows]
    real = torch.tensor([r for _, r in rows])
    clean = batch_of(target, seed, real.double())
    junk = batch_of([not t for t in target], seed + 1)
    mixed = {k: torch.where(real.view(-1, *[1] * (v.dim() - 1)), v, junk.data[k]) for k, v in clean.data.items()}
    mixed["x"] = torch.where(real.view(-1, 1, 1, 1), clean.x, size * junk.x)
    points = T.stack([point(made, seed % 5), point(made, seed % 5 + 1)])
    keys = rng.fold(KEY, torch.arange(2))

    def one(z, weight, key, ledger=None):
        ops = EngineOps(made.objectives, {}, ledger)
        d, aux = ops.grad("train", z, Batch(mixed, weight), key)
        out = T.map(lambda v: v.multiplied_out("test") if hasattr(v, "multiplied_out") else v, d)
        return {"d": out, "loss": aux["loss"]}

    weights = torch.stack([clean.weight, torch.ones_like(clean.weight)])
    alone = []
    for i in range(2):
        data = clean.data if i == 0 else mixed
        d, aux = EngineOps(made.objectives, {}).grad("train", T.index(points, i), Batch(data, weights[i]), keys[i])
        alone.append({"d": d, "loss": aux["loss"]})
    batched = torch.func.vmap(one)(points, weights, keys)
    factored = torch.func.vmap(lambda z, w, k: one(z, w, k, Ledger(2, Notes())))(points, weights, keys)
    for found in (batched, factored):
        for a, b in zip(T.leaves(found), T.leaves(T.stack(alone)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_direction_scales_with_the_sign_of_its_part():
    made = task(nu=0.5)
    z, batch = point(made), batch_of(MIXED)
    half, full = direction(made, z, batch)[0], direction(task(nu=0.5, psi_rescale=False), z, batch)[0]
    for a, b in zip(T.leaves(half["y"]), T.leaves(full["y"]), strict=True):
        torch.testing.assert_close(a, 2 * b)


# -- what is measured, and refused
def test_metrics():
    made = task(loss="cdan")
    z = point(made)
    batch = batch_of(MIXED)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    found = made.functions["predict"](z, batch)
    features = made.features(z, batch.x)
    logits = made.logits(z, features)
    torch.testing.assert_close(found["logits"], logits)
    judged = made.judged(z, features, logits)[:, 0]
    told = ((judged > 0) == batch.data["target"]).double().mean()
    got = made.metrics(found, {"y": y, "target": batch.data["target"]})
    assert got["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert got["loss"] == pytest.approx(float(F.cross_entropy(logits, y)))
    assert got["domain_accuracy"] == pytest.approx(float(told))
    assert set(made.metrics(found, {"y": y})) == {"accuracy", "loss"}
    each = made.functions["per_example"](z, Batch({"x": batch.x, "y": y}, batch.weight))
    assert float(each["loss"].mean()) == pytest.approx(got["loss"])
    assert float(each["accuracy"].mean()) == pytest.approx(got["accuracy"])
    hidden = made.functions["per_example"](z, batch)  # where there is no label, none is right
    assert float(hidden["accuracy"][batch.data["target"]].max()) == 0
    for loss in ("none", "mdd"):
        other = task(loss=loss)
        assert set(other.functions["predict"](point(other), batch)) == {"logits"}


def test_options_that_mean_nothing_are_refused(subtests):
    rows = [
        ({"loss": "none", "nu": 0.5}, "nu=0.5 is not for loss=none: leave it out"),
        ({"loss": "none", "fine_tune": True}, "fine_tune=True is not for loss=none: leave it out"),
        ({"loss": "dann", "cdan_detach": True}, "cdan_detach=True is not for loss=dann: leave it out"),
        ({"loss": "cdan", "mdd_margin": 3.0}, "mdd_margin=3.0 is not for loss=cdan: leave it out"),
        ({"loss": "cdan", "dropout": 0.1}, "dropout=0.1 is not for loss=cdan: leave it out"),
        ({"loss": "mdd", "dropout": 0.1}, "dropout=0.1 is not for model=mlp, whose heads have no hidden layers"),
        ({"model": "conv2", "hidden": (5,)}, "hidden=[5] is not for model=conv2: leave it out"),
        ({"source_share": 0.2}, "source_share=0.2 is of use with task_weight=per_sample only"),
        ({"feature_gradient": 0.2}, "feature_gradient=0.2 is of use with fine_tune=true only"),
    ]  # fmt: skip
    for options, says in rows:
        with subtests.test(says), pytest.raises(ValidationError, match=re.escape(says)):
            AdaptationOptions(**options)


def test_convolutions_need_images():
    for shape in ((64,), (1, 3, 8)):
        with pytest.raises(ValueError, match="model 'conv2' needs images of at least 4x4"):
            DomainAdaptation(AdaptationOptions(model="conv2"), DataShape(shape, 10))
