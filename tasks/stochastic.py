"""Classification by features that are drawn: FedSR's net, which any algorithm may train.

Nguyen, Torr & Lim, "FedSR: a simple and effective domain generalization method for federated learning", NeurIPS 2022, and its
released code. A net gives mu and s of each example; sigma = softplus(s), the feature is z = mu + sigma eps, a linear head
classifies it.

    paper, released code    here
    net, cls                z["x"]: "encoder.…", whose last layer has twice the width of z, and "head.…"
    r_mu, r_sigma, C        z["p"]: "mu", "sigma" before softplus (classes, latent), and "scale"; only FedSR has them
    cross-entropy           objective "train", of one draw an example
    FedSR's objective       objective "fedsr": cross-entropy + l2r |z| + cmi KL(N(C mu, (C sigma)^2) || N(r_mu, r_sigma^2)) for the
                            example's class, averaged over the batch; ctx {"l2r", "cmi"}

The norm is Euclidean and not squared, as in the released code. Outside training the probabilities of several draws are averaged.
These are the same for every example and always, so that what is measured of a model is a function of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree, rng
from fedfleet.tasks.losses import cross_entropy, one_hot, scored
from fedfleet.tasks.options import DataShape, Width
from fedfleet.tasks.photographs import PhotographOptions, made
from fedfleet.tasks.stateful import buffers, called, prepared


class StochasticOptions(PhotographOptions):
    """Options of a net whose features are drawn."""

    model: str = "mlp"
    """One of logistic, mlp, cnn, cnn_bn, lenet, lenet_sigmoid, convnet, cnn5; or torchvision's mobilenet_v2, resnet18, resnet50,
    resnet101."""
    latent: Width = 512
    """Width of the features."""
    samples: int = Field(default=20, ge=1)
    """Draws of an example's features whose probabilities are averaged outside training."""

    @model_validator(mode="after")
    def _any_sign(self) -> StochasticOptions:
        if self.model == "lenet_relu":
            raise ValueError("model=lenet_relu has no outputs below 0, which a mean may be: choose lenet")
        if self.init != "drawn":
            raise ValueError(f"init={self.init}: features that are all alike teach their head nothing: leave it out")
        return self


class Net(nn.Module):
    """An encoder, and the head of what is drawn."""

    def __init__(self, encoder: nn.Module, head: nn.Linear):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation (B, latent) of the features of inputs (B, ...)."""
        mu, s = self.encoder(x).chunk(2, dim=1)
        return mu, F.softplus(s)


class Drawn(NamedTuple):
    """Features (B, latent) with their means and deviations, their logits (B, classes), what layers have counted by then."""

    mu: Tensor
    sigma: Tensor
    features: Tensor
    logits: Tensor
    aux: dict[str, Any]


def divergence(mu: Tensor, sigma: Tensor, r_mu: Tensor, r_sigma: Tensor) -> Tensor:
    """Return KL(N(mu, sigma^2) || N(r_mu, r_sigma^2)) summed over the features: (B, latent) each, to (B,).

    Deviations may have either sign.
    """
    ratio, away = sigma / r_sigma, (mu - r_mu) / r_sigma
    return ((ratio.square() + away.square() - 1) / 2 - ratio.abs().log()).sum(1)  # small ones have no square


class Stochastic:
    """A net of drawn features, cross-entropy, accuracy.

    Functions: "predict", the logarithm of each class' mean probability (B, classes); "per_example", accuracy and loss (B,).
    """

    def __init__(self, options: StochasticOptions, shape: DataShape):
        self._options, self._shape = options, shape
        self._net = self._build(0)
        self.parts = ("x", BUFFERS) if buffers(self._net) else ("x",)
        self.objectives = {
            "train": Objective(loss=self._train, sign={"x": 1}),
            "fedsr": Objective(loss=self._fedsr, sign={"x": 1, "p": 1}),
        }
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": lambda z, batch: self.log_probabilities(z, batch.x),
            "per_example": lambda z, batch: scored(self.log_probabilities(z, batch.x), batch.y),
        }

    def _build(self, seed: int) -> nn.Module:
        o, shape = self._options, self._shape
        encoder = made(o, shape.example, 2 * o.latent, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(~seed)  # or the head would begin with the numbers of the encoder's first layer
            head = nn.Linear(o.latent, shape.classes)
        return prepared(Net(encoder, head))

    def init(self, seed: int) -> Tree:
        """Return the nets' initial parameters, and what their layers keep count of, by name."""
        net = self._build(seed)
        z = {"x": {name: p.detach() for name, p in net.named_parameters()}}
        return z | ({BUFFERS: buffers(net)} if BUFFERS in self.parts else {})

    def reference(self, z: Tree) -> Tree:
        """Return the part that the objective "fedsr" takes besides, as a client of the model ``z`` begins with it."""
        like = z["x"]["head.weight"]
        of = {"mu": torch.zeros_like(like), "sigma": torch.ones_like(like), "scale": like.new_ones(())}
        return {"p": of}

    def log_probabilities(self, z: Tree, x: Tensor) -> Tensor:
        """Return the logarithm of each class' mean probability over the draws (B, classes) for inputs (B, ...)."""
        samples = self._options.samples
        (mu, sigma), _ = called(self._net, z["x"], z.get(BUFFERS, {}), x)
        noise = rng.normal(rng.key(0, mu.device), (samples, mu.shape[1]), mu.dtype)
        logits = _logits(z, mu[:, None] + sigma[:, None] * noise)  # (B, samples, classes)
        return logits.log_softmax(2).logsumexp(1) - math.log(samples)

    def _draw(self, z: Tree, batch: Batch, key: Key) -> Drawn:
        counted = z.get(BUFFERS, {})
        (mu, sigma), new = called(self._net, z["x"], counted, batch.x, weight=batch.weight, key=key)
        features = mu + sigma * rng.normal(rng.fold(key, "features"), tuple(mu.shape), mu.dtype)
        return Drawn(mu, sigma, features, _logits(z, features), {BUFFERS: new} if new else {})

    def _train(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        drawn = self._draw(z, batch, key)
        return batch.mean(cross_entropy(drawn.logits, batch.y)), drawn.aux

    def _fedsr(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        drawn, r = self._draw(z, batch, key), z["p"]
        label = one_hot(batch.y, self._shape.classes, drawn.mu.dtype)
        r_mu, r_sigma = label @ r["mu"], F.softplus(label @ r["sigma"])
        real = (batch.weight > 0)[:, None]  # a deviation of 0, which BatchNorm may make of padding, has no logarithm
        mu, sigma = torch.where(real, drawn.mu, 0.0), torch.where(real, drawn.sigma, 1.0)
        apart = divergence(r["scale"] * mu, r["scale"] * sigma, r_mu, r_sigma)
        length = torch.linalg.vector_norm(drawn.features, dim=1)
        loss = cross_entropy(drawn.logits, batch.y) + ctx["l2r"] * length + ctx["cmi"] * apart
        return batch.mean(loss), drawn.aux

    def probabilities(self, outputs: Tree) -> Tensor:
        """Return how likely each class is (n, classes)."""
        return outputs.exp()

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return accuracy and mean cross-entropy."""
        right = outputs.argmax(1) == data["y"]
        return {"accuracy": float(right.double().mean()), "loss": float(F.nll_loss(outputs.double(), data["y"]))}


def _logits(z: Tree, features: Tensor) -> Tensor:
    """Return the head's outputs (..., classes) for features (..., latent)."""
    return F.linear(features, z["x"]["head.weight"], z["x"]["head.bias"])
