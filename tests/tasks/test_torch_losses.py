"""Torch's own losses are torch's: a batch's value and gradient, whatever their options, for one client and for many."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import fedfleet
from fedfleet.simulator.work import Batch
from fedfleet.tasks import torch_losses
from fedfleet.tasks.measures import OF_LABELS, alone
from fedfleet.tasks.module import _loss
from fedfleet.tasks.targets import IGNORED
from tests.refusals import refused

B, C = 7, 4
GEN = torch.Generator().manual_seed(0)
LOGITS, NUMBERS, PIXELS = (
    torch.randn(shape, generator=GEN, dtype=torch.float64) for shape in ((B, C), (B, 3), (B, C, 2, 3))
)
LABELS = torch.tensor([0, 1, 2, 3, 1, 0, 2])
SOME = LABELS.masked_fill(torch.tensor([False, True, False, False, True, False, False]), -100)
OF_PIXELS = torch.randint(C, (B, 2, 3), generator=GEN)
YES = (torch.rand((B, C), generator=GEN) > 0.5).double()
SIGNS = 2 * YES - 1
SOFT = torch.softmax(torch.randn((B, C), generator=GEN, dtype=torch.float64), 1)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1])
CASES = [
    (nn.CrossEntropyLoss(), LOGITS, LABELS),
    (nn.CrossEntropyLoss(), LOGITS, SOME),
    (nn.CrossEntropyLoss(ignore_index=1), LOGITS, LABELS),
    (nn.CrossEntropyLoss(weight=WEIGHT), LOGITS, SOME),
    (nn.CrossEntropyLoss(label_smoothing=0.2), LOGITS, SOME),
    (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), LOGITS, LABELS),
    (nn.CrossEntropyLoss(reduction="sum"), LOGITS, LABELS),
    (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2), PIXELS, OF_PIXELS),
    (nn.CrossEntropyLoss(), LOGITS, SOFT),
    (nn.NLLLoss(weight=WEIGHT), LOGITS.log_softmax(1), LABELS),
    (nn.MultiMarginLoss(p=2, margin=0.5, weight=WEIGHT), LOGITS, LABELS),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), LOGITS, YES),
    (nn.BCEWithLogitsLoss(weight=WEIGHT, reduction="sum"), LOGITS, YES),
    (nn.MultiLabelSoftMarginLoss(weight=WEIGHT), LOGITS, YES),
    (nn.BCELoss(weight=WEIGHT), LOGITS.sigmoid(), YES),
    (nn.MSELoss(), NUMBERS, NUMBERS.flip(0)),
    (nn.MSELoss(reduction="sum"), NUMBERS, NUMBERS.flip(0)),
    (nn.L1Loss(), NUMBERS, NUMBERS.flip(0)),
    (nn.SmoothL1Loss(beta=0.3), NUMBERS, NUMBERS.flip(0)),
    (nn.HuberLoss(delta=0.3), NUMBERS, NUMBERS.flip(0)),
    (nn.PoissonNLLLoss(log_input=False, full=True, eps=1e-3), NUMBERS.exp(), NUMBERS.exp().round()),
    (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), SOFT),
    (nn.KLDivLoss(log_target=True), LOGITS.log_softmax(1), SOFT.log()),
    (nn.SoftMarginLoss(), LOGITS, SIGNS),
    (nn.HingeEmbeddingLoss(margin=0.7), LOGITS, SIGNS),
    (nn.MultiLabelMarginLoss(), LOGITS, torch.tensor([[1, 2, -1, 0]] * B)),
    (nn.MSELoss, NUMBERS, NUMBERS.flip(0)),
    (F.cross_entropy, LOGITS, LABELS),
    (functools.partial(F.cross_entropy, weight=WEIGHT, reduction="sum"), LOGITS, LABELS),
    (functools.partial(F.smooth_l1_loss, beta=0.3), NUMBERS, NUMBERS.flip(0)),
    (lambda o, y: F.cross_entropy(o, y), LOGITS, LABELS),  # the mean as one number, as everybody writes it
    (lambda o, y: F.cross_entropy(o, y, weight=WEIGHT.double(), label_smoothing=0.1), LOGITS, LABELS),
    (lambda o, y: F.cross_entropy(o, y, reduction="sum"), LOGITS, LABELS),
    (lambda o, y: ((o - y) ** 2).mean(), NUMBERS, NUMBERS.flip(0)),
]


def theirs(f: Any, outputs: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's loss of a batch, and its gradient with respect to the outputs."""
    f = f() if isinstance(f, type) else f.double() if isinstance(f, nn.Module) else f
    if isinstance(f, functools.partial):
        f = functools.partial(
            f.func, **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in f.keywords.items()}
        )
    outputs = outputs.clone().requires_grad_()
    value = f(outputs, y)
    return value.detach(), torch.autograd.grad(value, outputs)[0]


@pytest.mark.parametrize(("f", "outputs", "y"), CASES, ids=lambda v: str(v) if isinstance(v, nn.Module) else "")
def test_a_batch_is_torchs(f, outputs, y):
    loss = _loss(f, "")
    assert loss.misfit(outputs, y) is None

    def ours(outputs: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return loss.of_batch(outputs, Batch({"y": y}, weight))

    found = torch.func.grad_and_value(ours)
    whole = torch.ones(B, dtype=torch.float64)
    gradient, value = found(outputs, y, whole)
    wanted = theirs(f, outputs, y)
    torch.testing.assert_close((value, gradient), wanted, rtol=1e-10, atol=1e-12)
    if loss.own is None and not loss.total:
        assert loss.mean(outputs, y) == pytest.approx(float(wanted[0]))
    # Two clients at once, the second of fewer rows: what fills its batch up counts nothing.
    weight = torch.stack([whole, (torch.arange(B) < 5).double()])
    many = torch.func.vmap(found, in_dims=(None, None, 0))(outputs, y, weight)
    fewer = theirs(f, outputs[:5], y[:5])
    torch.testing.assert_close((many[1][0], many[0][0]), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((many[1][1], many[0][1][:5]), fewer, rtol=1e-10, atol=1e-12)
    assert not many[0][1][5:].any()


def test_a_batch_in_which_nothing_counts_moves_nothing():
    loss = _loss(nn.CrossEntropyLoss(), "")
    batch = Batch({"y": torch.full((B,), -100)}, torch.ones(B, dtype=torch.float64))
    gradient, value = torch.func.grad_and_value(lambda o: loss.of_batch(o, batch))(LOGITS)
    assert (float(value), bool(gradient.any())) == (0.0, False)


def test_every_loss_of_torch_is_known_or_refused():
    modules = [m for m in vars(nn.modules.loss).values() if isinstance(m, type) and issubclass(m, torch_losses._Loss)]
    public = [
        m for m in modules if not m.__name__.startswith("_") and m not in torch_losses.MODULES and m is not nn.NLLLoss2d
    ]
    assert len(public) >= 5
    for module in public:
        refused(lambda module=module: torch_losses.from_torch(module.__new__(module)), f"loss={module.__name__}")


@pytest.mark.parametrize(
    "f",
    [
        lambda o, y: F.cross_entropy(o, y, weight=torch.bincount(y, minlength=4).to(o)),  # weights of this batch alone
        lambda o, y: 2.0 * F.cross_entropy(o, y, weight=WEIGHT.to(o)),  # a weighted mean
        lambda o, y: (
            F.cross_entropy(o, y, weight=WEIGHT.to(o), label_smoothing=0.1) + o.mean()
        ),  # which vmap does not map
        lambda o, y: F.cross_entropy(o, y, reduction="sum") + 0.0,
        lambda o, y: (o.mean(0) ** 2).sum(),
    ],
)
def test_one_number_that_is_no_mean_is_refused(f):
    same = torch.zeros_like(LABELS)  # the first rows may be of one class
    wrong = [_loss(f, "").misfit(LOGITS, y) for y in (LABELS, same)]
    assert all(text is not None and "reduction='none'" in text for text in wrong)


def test_a_loss_without_a_gradient_is_refused():
    for f in (lambda o, y: F.cross_entropy(o.detach(), y, reduction="none"), lambda o, y: (o.argmax(1) != y).float()):
        assert "no gradient" in str(_loss(f, "").misfit(LOGITS, LABELS))


def test_a_loss_of_torch_in_a_function_has_its_metrics_and_options():
    smooth = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)
    found = _loss(lambda o, y: smooth(o, y), "")
    assert (found.name, found.metrics, found.weighted, found.own) == ("cross_entropy", ("accuracy",), True, None)
    assert _loss(lambda o, y: F.cross_entropy(2 * o, y), "").own is not None
    assert _loss(lambda o, y: F.cross_entropy(o, y, reduction="none"), "").own is None


def test_a_run_with_it_is_the_run_with_its_name(tmp_path):
    config = {"rounds": 2, "population.clients": 20, "executor.kind": "local", "cohort.size": 5}
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    losses = {
        "name": "cross_entropy",
        "module": nn.CrossEntropyLoss(),
        "function": F.cross_entropy,
        "mine": lambda o, y: F.cross_entropy(o, y),
        "weighted": nn.CrossEntropyLoss(weight=torch.linspace(0.1, 1.0, 10)),
    }
    runs = {
        name: fedfleet.run(config, task=fedfleet.tasks.from_module(net, loss=loss), out=tmp_path / name)
        for name, loss in losses.items()
    }
    found = {name: run.summary["final"]["eval/loss"] for name, run in runs.items()}
    assert [found[name] for name in ("module", "function", "mine")] == pytest.approx([found["name"]] * 3, rel=1e-5)
    said = {name: str(yaml.safe_load((run.folder / "config.yaml").read_text())["task"]) for name, run in runs.items()}
    assert said.pop("mine") == said["function"]
    assert len(set(said.values())) == len(losses) - 1  # the weights are part of what a record says
    assert runs["module"].summary["final"]["eval/accuracy"] == runs["name"].summary["final"]["eval/accuracy"]
    refused(lambda: fedfleet.tasks.from_module(net, loss=nn.CTCLoss()), "loss=CTCLoss")
    secret = {
        **config,
        "algorithm": "fedavg",
        "example_privacy": {"clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0},
    }
    for loss in (losses["weighted"], nn.CrossEntropyLoss(reduction="sum")):
        task = fedfleet.tasks.from_module(net, loss=loss)
        refused(
            lambda task=task: fedfleet.run(secret, task=task, out=tmp_path / "secret"),
            "example_privacy: loss=cross_entropy",
        )


@pytest.mark.parametrize("ignored", [255, -1, 1])
def test_a_label_that_is_ignored_is_measured_as_one_of_minus_100(ignored):
    """Be it a class or not: for losses, metrics, and what is said before a run."""
    for outputs, y in (
        (torch.randn(12, 3), torch.arange(12) % 3),
        (torch.randn(4, 3, 2, 2), torch.arange(16).view(4, 2, 2) % 3),
    ):
        usual, other = y.masked_fill(y == 1, IGNORED), y.masked_fill(y == 1, ignored)
        found = []
        for labels, loss in ((usual, nn.CrossEntropyLoss()), (other, nn.CrossEntropyLoss(ignore_index=ignored))):
            made = torch_losses.from_torch(loss)
            assert made is not None
            assert made.misfit(outputs, labels) is None
            assert made.astray(outputs, labels) is None
            named = [metric(made, outputs, labels) for metric in OF_LABELS.values()]
            each = alone("accuracy", made, outputs, labels)
            found.append([made.each(outputs, labels).sum(), torch.tensor(named), each])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    of_torch = torch_losses.from_torch(nn.CrossEntropyLoss(ignore_index=ignored))
    assert of_torch is not None
    assert of_torch.astray(torch.zeros(1, 3), torch.tensor([IGNORED])) is not None  # torch refuses it, too
