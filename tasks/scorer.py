"""The frozen classifier that judges generated images: one trained here on the real ones, or torchvision's Inception.

A classifier is trained once, and kept as safetensors in the user's cache under a name made of the data and its options.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedfleet.files import tensors
from fedfleet.simulator.arithmetic.digest import digest
from fedfleet.simulator.population import decode
from fedfleet.simulator.registry import Options
from fedfleet.tasks import pretrained

BATCH = 64
INCEPTION = "inception_v3_google-0cc3c7bd.pth"
INCEPTION_SIDE = 299


class ScorerOptions(Options):
    """Which classifier judges."""

    net: Literal["small", "resnet18", "inception"] = "small"
    """small: two convolutions and a layer of 64, in seconds; resnet18: CDMA's, in hours on a CPU; inception: torchvision's
    Inception-v3 of ImageNet, if its weights are in torch's cache (other weights than those behind published FIDs)."""
    epochs: float = Field(default=2.0, gt=0, le=10_000)
    """Passes over the training examples (CDMA: 60), in batches of 64 drawn with replacement; Adagrad with a rate of 0.01."""


class Scorer(nn.Module):
    """A classifier in two parts. ``about`` says in words what it is; an untrained one stands in until there is another."""

    def __init__(self, body: nn.Module, head: nn.Module, about: str = "untrained"):
        super().__init__()
        self.body, self.head, self.about = body, head, about

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities (B, classes) and features (B, f) of images (B, ...) in [-1, 1]."""
        features = self.body(x)
        return self.head(features).softmax(1), features


class _Inception(nn.Module):
    """Pooled features (B, 2048) of images enlarged to 299 x 299."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        size = (INCEPTION_SIDE, INCEPTION_SIDE)
        return self.net(F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True))


def untrained(options: ScorerOptions, shape: tuple[int, ...], classes: int, seed: int = 0) -> Scorer:
    """Return a classifier of images of a shape with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels, height, width = shape
        if options.net == "resnet18":
            from torchvision.models import resnet18  # here, for torchvision takes more than a second to import

            net = resnet18(num_classes=classes)
            net.conv1 = nn.Conv2d(channels, 64, 7, 2, 3)
            head, net.fc = net.fc, nn.Identity()  # pyright: ignore
            return Scorer(net, head)
        body = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU()),
        )
        return Scorer(body, nn.Linear(64, classes))


def prepared(options: ScorerOptions, x: Tensor, y: Tensor, classes: int, say: Callable[[str], None]) -> Scorer:
    """Return the classifier for images like x (n, c, h, w) with labels y (n,), trained unless the cache has it; frozen."""
    if options.net == "inception":
        return _frozen(_inception())
    made = untrained(options, tuple(x.shape[1:]), classes)
    name = f"{options.net}-{options.epochs:g}-{classes}-{digest('', {'x': x, 'y': y})[:12]}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedfleet" / "classifiers"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    with (folder / f"{name}.lock").open("w") as lock:
        with suppress(ImportError):  # Windows has none
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be training it
        if not _kept(made, path):
            say(f"training a classifier ({options.net}) on {len(x):,} images to score generated ones by; once")
            _train(made, options, x, y, say)
            tensors.write(path, made.state_dict())
            _kept(made.cpu(), path)
    weights = digest("", dict(made.state_dict()))[:12]  # trained elsewhere, or again, they are others
    made.about = f"a classifier trained here ({name}, weights {weights})"
    return _frozen(made)


def _kept(made: Scorer, path: Path) -> bool:
    """Load what an earlier run has kept; say whether there was anything that fits."""
    try:
        made.load_state_dict(tensors.read(path))
    except (*tensors.UNREADABLE, RuntimeError):
        return False
    return True


def _train(made: Scorer, options: ScorerOptions, x: Tensor, y: Tensor, say: Callable[[str], None]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator().manual_seed(0)
    made.to(device).train()
    optimizer = torch.optim.Adagrad(made.parameters(), lr=0.01)
    steps = max(1, round(options.epochs * len(x) / BATCH))
    for step in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=draw)
        features = made.body(decode(x[rows].to(device)))
        loss = F.cross_entropy(made.head(features), y[rows].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 5) == 0:
            say(f"classifier: step {step + 1}/{steps}, loss {loss.item():.3f}")


def check(options: ScorerOptions) -> None:
    """Refuse a classifier whose weights are not there. Raises ValueError."""
    if options.net == "inception" and not _weights().exists():
        raise ValueError(
            f"task.scorer.net='inception': {_weights()} is not there: download torchvision's weights, or set task.scorer.net=small"
        )


def _weights() -> Path:
    return pretrained.cached(INCEPTION)


def _inception() -> Scorer:
    path = _weights()
    if not pretrained.genuine(path):
        raise ValueError(f"task.scorer.net='inception': {path} is not torchvision's file: download it again")
    from torchvision.models import inception_v3

    net = inception_v3(weights=None, transform_input=False, init_weights=False)
    net.load_state_dict(pretrained.loaded(path))
    net.aux_logits, net.AuxLogits = False, None
    head, net.fc = net.fc, nn.Identity()  # pyright: ignore
    return Scorer(_Inception(net), head, f"torchvision's Inception-v3 ({INCEPTION})")


def _frozen(made: Scorer) -> Scorer:
    return made.eval().requires_grad_(requires_grad=False)
