"""Two heads: the losses' bounds and gradients, the surer head, the nets' sizes."""

import math

import pytest
import torch

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.author import BUFFERS
from fedfleet.simulator.block.gradient import EngineOps
from fedfleet.simulator.work import Batch
from fedfleet.tasks.options import DataShape
from fedfleet.tasks.stateful import buffers, called
from fedfleet.tasks.two_heads import TwoHeads, TwoHeadsOptions
from fedfleet.tasks.two_heads_nets import build

KEY = rng.key(3)
ROWS = 12


def task(classes: int = 10, shape: tuple[int, ...] = (4,), **options) -> TwoHeads:
    hidden = {} if "model" in options else {"hidden": (5, 6)}
    return TwoHeads(TwoHeadsOptions(**{**hidden, **options}), DataShape(shape, classes))


def two(of: TwoHeads, first: int = 0, second: int = 1, scale: float = 1.0):
    """A model with the heads of two initialisations, float64."""
    z = of.init(first) | {"second": of.init(second)["head"]}
    return T.map(lambda v: v.double() * scale, {p: z[p] for p in ("x", "head", "second")})


def batch(rows: int = ROWS, classes: int = 10, features: int = 4, **more) -> Batch:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Batch({"x": x, "y": torch.arange(rows) % classes, **more}, torch.ones(rows, dtype=torch.float64))


def value(of: TwoHeads, name: str, z, where: Batch) -> float:
    return float(of.objectives[name].loss(z, where, None, KEY)[0])


def gradient(of: TwoHeads, name: str, z, where: Batch, **given):
    return EngineOps(of.objectives, of.functions).grad(name, z, where, KEY, **given)[0]


def test_statistics_are_a_part_of_nets_that_have_some():
    assert task().parts == ("x", "head")
    assert task(10, (1, 8, 8), model="digits_small").parts == ("x", "head", BUFFERS)


@pytest.mark.parametrize("classes", [2, 10, 31])
def test_cross_entropy_with_two_softmaxes_is_bounded_below(classes):
    """ln(e + K - 1) - 1 is reached where a head is sure, and right; with one softmax it is 0."""
    of, plain = task(classes), task(classes, double_softmax=False)
    z, where = two(of), batch(60, classes)
    least = math.log(math.e + classes - 1) - 1
    assert classes != 10 or least == pytest.approx(1.4612, abs=1e-4)
    for scale in (0.1, 1, 30, 1000):
        assert value(of, "train", T.scale(scale, z), where) >= least - 1e-12
    sure = {
        "x": z["x"],
        "head": {"0.weight": torch.zeros(classes, 6).double(), "0.bias": torch.zeros(classes).double()},
    }
    sure["head"]["0.bias"][0] = 200.0
    first = Batch({**where.data, "y": torch.zeros(60, dtype=torch.int64)}, where.weight)
    assert value(of, "train", sure, first) == pytest.approx(least, abs=1e-9)
    assert value(plain, "train", sure, first) == pytest.approx(0, abs=1e-9)


def test_both_losses_by_hand():
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]], dtype=torch.float64)
    other = torch.tensor([[0.5, 0.0, 0.5], [2.0, -1.0, 1.0]], dtype=torch.float64)
    head = {"0.weight": torch.zeros(3, 2).double()}
    where = Batch({"x": torch.zeros(1, 2).double(), "y": torch.tensor([2])}, torch.ones(1).double())
    for row in range(2):
        z = {
            "x": {f"{i}.{k}": torch.zeros(s).double() for i in (1,) for k, s in (("weight", (2, 2)), ("bias", (2,)))},
            "head": head | {"0.bias": logits[row]},
            "second": head | {"0.bias": other[row]},
        }
        for double in (True, False):
            once, scores = logits[row].softmax(0), (logits[row], other[row])
            entropy = -torch.log_softmax(once if double else logits[row], 0)[2]
            p, q = (s.softmax(0).softmax(0) if double else s.softmax(0) for s in scores)
            distance = float((p - q).abs().sum())
            for reduction, share in (("class_sum", 1), ("class_mean", 1 / 3)):
                of = task(3, (2,), hidden=(2,), double_softmax=double, idd_reduction=reduction)
                one = {p: z[p] for p in ("x", "head")}
                both = float(entropy) + value(of, "train", one | {"head": z["second"]}, where)
                assert value(of, "train", one, where) == pytest.approx(float(entropy), abs=1e-12)
                assert value(of, "train", z, where) == pytest.approx(both, abs=1e-12)
                assert value(of, "idd", z, where) == pytest.approx(share * distance, abs=1e-12)
                assert value(of, "discord", z, where) == pytest.approx(both - share * distance, abs=1e-12)


@pytest.mark.parametrize(("double", "reduction", "most"), [
    (False, "class_sum", 2.0), (False, "class_mean", 0.2), (True, "class_mean", 2 * (math.e - 1) / (10 * (math.e + 9))),
    (True, "class_sum", 2 * (math.e - 1) / (math.e + 9)),
])  # fmt: skip
def test_discrepancy_is_symmetric_and_bounded(double, reduction, most):
    of = task(double_softmax=double, idd_reduction=reduction)
    where = batch()
    for scale in (0.3, 1.0, 50.0):
        z = two(of, scale=scale)
        swapped = {"x": z["x"], "head": z["second"], "second": z["head"]}
        assert value(of, "idd", z, where) == value(of, "idd", swapped, where)
        assert 0 < value(of, "idd", z, where) <= most + 1e-12
    z = two(of)
    for head, label in (("head", 0), ("second", 1)):  # sure of different classes: the bound is reached
        z[head] = T.zeros_like(z[head])
        z[head]["0.bias"][label] = 500.0
    assert value(of, "idd", z, where) == pytest.approx(most, rel=1e-9)


def test_equal_heads_have_no_discrepancy_and_no_gradient():
    """The sign of 0 is 0."""
    of = task()
    z = two(of, 0, 0)
    assert value(of, "idd", z, batch()) == 0
    assert all(not leaf.any() for leaf in T.leaves(gradient(of, "idd", z, batch())))


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("reduction", ["class_mean", "class_sum"])
@pytest.mark.parametrize("objective", ["train", "idd", "discord"])
def test_gradients_by_finite_differences(objective, reduction, double):
    of = task(hidden=(5,), idd_reduction=reduction, double_softmax=double)
    z, where, h = two(of), batch(), 1e-6
    found = gradient(of, objective, z, where)
    moved = {"train": ("x", "head", "second"), "idd": ("x",), "discord": ("head", "second")}[objective]
    for part in z:
        for name, leaf in z[part].items():
            if part not in moved:
                assert not found[part][name].any()
                continue
            for i in range(0, leaf.numel(), 7):
                step = torch.zeros(leaf.numel(), dtype=leaf.dtype)
                step[i] = h
                ends = []
                for sign in (1, -1):
                    there = {**z, part: {**z[part], name: leaf + sign * step.view(leaf.shape)}}
                    ends.append(value(of, objective, there, where))
                assert float(found[part][name].flatten()[i]) == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=1e-7)


def test_labels_count_in_labelled_rows_and_discrepancy_in_the_others():
    of = task()
    z, whole = two(of), batch()
    target = torch.arange(ROWS) % 3 == 0
    mixed = batch(target=target)
    mixed = Batch({**mixed.data, "y": torch.where(target, -1, mixed.y)}, mixed.weight)
    parts = {}
    assert value(of, "discord", z, mixed) == pytest.approx(value(of, "train", z, mixed) - value(of, "idd", z, mixed))
    for name, rows in (("train", ~target), ("idd", target)):
        parts[name] = Batch({k: v[rows] for k, v in whole.data.items()}, whole.weight[rows])
        assert value(of, name, z, mixed) == pytest.approx(value(of, name, z, parts[name]), abs=1e-12)
    assert value(of, "train", z, parts["idd"]) != pytest.approx(value(of, "train", z, mixed))
    nobody = batch(target=torch.ones(ROWS, dtype=torch.bool))
    assert value(of, "train", z, nobody) == 0


def test_the_surer_head_predicts_and_the_first_of_equal_ones():
    of = task(3, (2,), hidden=(2,))
    z = two(of)
    z = T.map(torch.zeros_like, z)
    where = Batch({"x": torch.zeros(1, 2).double(), "y": torch.tensor([0])}, torch.ones(1).double())
    for one, other, says in (
        ([3.0, 0.0, 0.0], [0.0, 2.0, 0.0], 0),
        ([2.0, 0.0, 0.0], [0.0, 3.0, 0.0], 1),
        ([9.0, 8.9, 0.0], [0.0, 3.0, 0.0], 1),  # surer by its probability, not by its logit
        ([0.0, 0.0, 4.0], [0.0, 4.0, 0.0], 2),  # equal: the first
    ):
        z["head"]["0.bias"], z["second"]["0.bias"] = torch.tensor(one).double(), torch.tensor(other).double()
        outputs = of.functions["predict"](z, where)
        assert int(outputs.argmax(1)) == says
        assert outputs.tolist() == [one if says == int(torch.tensor(one).argmax()) else other]
        assert float(of.functions["per_example"](z, where)["accuracy"]) == (says == 0)
    alone = {p: z[p] for p in ("x", "head")}
    assert int(of.functions["predict"](alone, where).argmax(1)) == 2


def test_metrics_are_those_of_one_softmax():
    of = task(3)
    outputs, y = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 2.0, 0.0]]), torch.tensor([0, 1, 2])
    found = of.metrics(outputs, {"y": y})
    assert found == {
        "accuracy": pytest.approx(2 / 3),
        "loss": pytest.approx(float(torch.nn.functional.cross_entropy(outputs, y)), rel=1e-6),
    }


@pytest.mark.parametrize(("model", "shape", "classes", "trainable", "counted"), [
    ("digit_five", (3, 32, 32), 10, (210_176, 25_483_550), (384, 6_344)),
    ("digits_small", (3, 32, 32), 10, (5_184, 263_818), (96, 256)),
    ("mlp", (1, 8, 8), 10, (64 * 64 + 64 + 64 * 64 + 64, 650), (0, 0)),
])  # fmt: skip
def test_parameter_counts(model, shape, classes, trainable, counted):
    """Of Digit-Five's nets as published; the paper's and the code's counts of buffers have those of how many batches they are."""
    with torch.device("meta"):
        nets = build(model, shape, classes, (64, 64), 0)
    assert tuple(T.count(dict(net.named_parameters())) for net in nets) == trainable
    assert tuple(T.count(buffers(net)) for net in nets) == counted


@pytest.mark.parametrize("model", ["mlp", "digits_small", "digit_five"])
def test_nets_give_an_output_a_class(model):
    shape = (3, 8, 8) if model != "digit_five" else (1, 4, 4)
    x = torch.randn(4, *shape)
    for net in build(model, shape, 7, (5,), 0):
        x, _ = called(net, dict(net.named_parameters()), buffers(net), x)
    assert x.shape == (4, 7)


SMALL = {"model": "digits_small", "shape": (1, 8, 8)}


def images(rows: int = ROWS) -> Batch:
    x = torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return Batch({"x": x, "y": torch.arange(rows) % 10}, torch.ones(rows))


def with_second(of: TwoHeads, seed: int = 0):
    """A model with the heads of two initialisations, and statistics."""
    z = of.init(0)
    z = {"x": z["x"], "head": z["head"], "second": of.init(seed)["head"], "b": z["b"]}
    of_heads = {n: v for n, v in z["b"].items() if n.startswith("head.")}
    return {**z, "b": z["b"] | {f"second.{n.removeprefix('head.')}": v for n, v in of_heads.items()}}


def test_equal_heads_differ_by_their_dropout_and_not_without_it():
    """Spec 3.3: in training mode the discrepancy of equal heads is not 0."""
    z, where = with_second(task(**SMALL)), images()
    assert value(task(**SMALL), "idd", z, where) > 0
    still = task(**SMALL, idd_heads_eval=True)
    assert value(still, "idd", z, where) == 0
    assert all(not leaf.any() for leaf in T.leaves(gradient(still, "idd", z, where)))


@pytest.mark.parametrize("still", [False, True])
def test_statistics_move_with_the_rows_a_net_has_seen(still):
    of = task(**SMALL, idd_heads_eval=still)
    z, where = with_second(of, 1), images()
    plain = {p: z[p] for p in ("x", "head")} | {"b": of.init(0)["b"]}
    after = of.objectives["train"].loss(plain, where, None, KEY)[1]["b"]
    assert after.keys() == plain["b"].keys()
    assert all(not torch.equal(after[n], v) for n, v in plain["b"].items())
    after = of.objectives["idd"].loss(z, where, None, KEY)[1]["b"]
    assert list(after) == list(z["b"])
    for name, v in z["b"].items():
        assert torch.equal(after[name], v) == (still and not name.startswith("x."))
    once, twice = (of.objectives[n].loss(z, where, None, KEY)[1]["b"] for n in ("idd", "discord"))
    assert not torch.equal(once["x.1.running_mean"], twice["x.1.running_mean"])  # of labelled rows, and of the others
    target = torch.arange(ROWS) < 5
    mixed = Batch({**where.data, "target": target}, where.weight)
    few = Batch({k: v[:5] for k, v in where.data.items()}, where.weight[:5])
    of_few, of_mixed = (of.objectives["idd"].loss(z, w, None, KEY)[1]["b"] for w in (few, mixed))
    for name in of_few:
        if name.startswith("x."):
            torch.testing.assert_close(of_few[name], of_mixed[name])


def test_evaluation_is_by_running_statistics_of_each_head():
    of, where = task(**SMALL), images()
    z = with_second(of, 1)
    z["b"] |= {n: v + 0.1 for n, v in z["b"].items() if n.startswith("second.")}
    nets = [n.eval() for n in build("digits_small", (1, 8, 8), 10, (), 0)]
    features = nets[0](where.x)
    heads = []
    for part in ("head", "second"):
        state = {**z[part], **{n.removeprefix(f"{part}."): v for n, v in z["b"].items() if n.startswith(f"{part}.")}}
        nets[1].load_state_dict(state)
        heads.append(nets[1](features))
    surer = heads[1].softmax(1).amax(1) > heads[0].softmax(1).amax(1)
    torch.testing.assert_close(of.functions["predict"](z, where), torch.where(surer[:, None], heads[1], heads[0]))
    assert surer.any()
    assert not surer.all()


@pytest.mark.parametrize(("model", "shape"), [("digits_small", (64,)), ("digit_five", (3, 3, 3))])
def test_nets_that_cannot_be_built_say_why(model, shape):
    with pytest.raises(ValueError, match=f"task.name='two_heads': model '{model}' needs images of at least 4x4"):
        task(shape=shape, model=model)


def test_widths_are_of_nets_that_have_some():
    with pytest.raises(ValueError, match=r"hidden=\[9\] is not for model=digit_five"):
        TwoHeadsOptions(model="digit_five", hidden=(9,))


@pytest.mark.parametrize(("name", "kind"), [("train", True), ("idd", False)])
def test_batches_without_a_row_that_counts_leave_running_statistics_alone(name, kind):
    """Those without labels for the cross-entropy, those with labels for the discrepancy."""
    of = task(10, (1, 8, 8), model="digits_small")
    z = with_second(of)
    x = torch.randn(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def after(target: torch.Tensor):
        where = Batch({"x": x, "y": torch.arange(ROWS) % 10, "target": target}, torch.ones(ROWS))
        return of.objectives[name].loss(z, where, None, KEY)[1][BUFFERS]

    still, moved = (after(torch.full((ROWS,), found)) for found in (kind, not kind))
    assert all(torch.equal(v, still[n]) for n, v in z[BUFFERS].items())
    assert not any(
        torch.equal(v, moved[n]) for n, v in z[BUFFERS].items() if not n.startswith("second") or name == "idd"
    )
