"""GAN training, CDMA's third experiment: a generator against a discriminator.

    paper, released code    here
    x                       z["x"], the generator G
    y                       z["y"], the discriminator D
    noise                   uniform on [-1, 1]^100, from the key of a step: the same at both points of Eq. (2) and (3)

    D, ascent on y     - bce(D(real), 1) - bce(D(G(z1)), 0)
    G, descent on x      bce(D(G(z2)), 1)                        non-saturating, so each player has an objective of its own

bce is the binary cross-entropy of logits, a mean over the batch; z1 and z2 are independent, as many as real examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedfleet.simulator.author import Batch, Key, Objective, Tree, rng
from fedfleet.tasks import gan_nets, scorer
from fedfleet.tasks.options import DataShape, TaskOptions
from fedfleet.tasks.scorer import ScorerOptions
from fedfleet.tasks.scores import frechet_distance, inception_score

ROWS = 100  # a batch of generated images, whose statistics normalise it


class GanOptions(TaskOptions):
    """The nets, and how generated images are judged."""

    width: float = Field(default=1.0, gt=0, le=64)
    """Channels and units of the nets, as a share of CDMA's."""
    samples: int = Field(default=10_000, ge=1000, le=1_000_000, multiple_of=ROWS)
    """Images generated at an evaluation, from fixed noise."""
    scorer: ScorerOptions = ScorerOptions()
    legacy_splits: bool = False
    """Overlapping splits of the Inception Score, as in CDMA's released code."""
    legacy_range: bool = False
    """Take images in [-1, 1] for ones in [0, 1], and scale them again, before the FID, as in CDMA's released code."""


class Gan:
    """A generator and a discriminator; Inception Score and FID by a frozen classifier.

    Functions: "predict", on a whole split: scores, each (1,); "per_example", both players' losses (B,).
    """

    parts = ("x", "y")
    whole = True
    measured = ("inception_score", "fid", "generator_loss", "discriminator_loss")

    def __init__(self, options: GanOptions, shape: DataShape):
        scorer.check(options.scorer)
        self._options, self._shape = options, shape
        self._generator, self._discriminator = self._build(0)
        self.scorer = scorer.untrained(options.scorer, shape.example, shape.classes)
        self._real: dict[tuple[Any, ...], Tensor] = {}
        self.objectives = {"train": Objective(loss=self._loss, sign={"x": 1, "y": -1})}
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": self._predict,
            "per_example": lambda z, batch: self.losses(z, batch, rng.key(0)),
        }

    def _build(self, seed: int) -> tuple[torch.nn.Module, torch.nn.Module]:
        try:
            return gan_nets.build(self._shape.example, self._options.width, seed)
        except ValueError as e:
            raise ValueError(f"task.name='gan': {e}") from None

    def init(self, seed: int) -> Tree:
        """Return both nets' initial parameters."""
        nets = zip(self.parts, self._build(seed), strict=True)
        return {part: {name: p.detach() for name, p in net.named_parameters()} for part, net in nets}

    def prepare(self, x: Tensor, y: Tensor, say: Callable[[str], None]) -> str:
        """Make the classifier ready on the training images x (n, ...) with labels y (n,); return what it is. Raises ValueError."""
        self.scorer = scorer.prepared(self._options.scorer, x, y, self._shape.classes, say)
        self._real.clear()
        return self.scorer.about

    def generate(self, z: Tree, noise: Tensor, real: Tensor) -> Tensor:
        """Return images (B, ...) in [-1, 1] from noise (B, 100); rows where ``real`` (B,) is 0 do not count."""
        return functional_call(self._generator, z["x"], (noise, real))

    def judge(self, z: Tree, images: Tensor, real: Tensor) -> Tensor:
        """Return the discriminator's logits (B,) of images being real."""
        return functional_call(self._discriminator, z["y"], (images, real))

    def losses(self, z: Tree, batch: Batch, key: Key) -> dict[str, Tensor]:
        """Return the generator's and the discriminator's losses (B,), both to be small."""
        real, rows = batch.weight, len(batch.weight)
        first, second = (self._noise(rng.fold(key, k), rows, batch.x) for k in (1, 2))
        fake = self.generate(z, first, real).detach()
        against = F.softplus(-self.judge(z, batch.x, real)) + F.softplus(self.judge(z, fake, real))
        fooled = F.softplus(-self.judge(z, self.generate(z, second, real), real))
        return {"generator_loss": fooled, "discriminator_loss": against}

    def _noise(self, key: Key, rows: int, like: Tensor) -> Tensor:
        return 2 * rng.uniform(key, (rows, gan_nets.LATENT)).to(like.device, like.dtype) - 1

    def _loss(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        result = self.losses(z, batch, key)
        return {"x": batch.mean(result["generator_loss"]), "y": -batch.mean(result["discriminator_loss"])}, {}

    def samples(self, z: Tree, count: int) -> Tensor:
        """Return images (count, ...) from fixed noise."""
        like = next(iter(z["x"].values()))
        noise = self._noise(rng.fold(rng.key(0), "samples"), count, like)
        return torch.cat([self.generate(z, n, torch.ones_like(n[:, 0])) for n in noise.split(ROWS)])

    def images(self, z: Tree) -> Tensor:
        """Return a few images (n, ...), to look at."""
        return self.samples(z, ROWS)

    def _predict(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        images = self.samples(z, self._options.samples)
        probabilities, features = self._judged(images)
        if self._options.legacy_range:
            features = self._judged(2 * images - 1)[1]
        where = (tuple(batch.x.shape), float(batch.x.sum(dtype=torch.float64)))
        if where not in self._real:
            self._real[where] = self._judged(2 * batch.x - 1 if self._options.legacy_range else batch.x)[1]
        result = {
            "inception_score": inception_score(probabilities, legacy_splits=self._options.legacy_splits),
            "fid": frechet_distance(features, self._real[where]),
        }
        few = Batch({"x": batch.x[:ROWS]}, batch.weight[:ROWS])
        losses = self.losses(z, few, rng.key(0))
        result |= {name: float(value.mean()) for name, value in losses.items()}
        return {name: torch.tensor([value], dtype=torch.float64) for name, value in result.items()}

    def _judged(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and features (n, ...) of images."""
        # Not moved: a net that tasks hold stays as it is, and moving it would put other buffers in the place of its own.
        state = {name: v.to(images.device) for name, v in self.scorer.state_dict().items()}
        result = [functional_call(self.scorer, state, (part,)) for part in images.split(ROWS)]
        probabilities, features = (torch.cat([f[i] for f in result]).cpu() for i in (0, 1))
        return probabilities, features

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the scores, and both players' losses on the first images."""
        return {name: float(value[0]) for name, value in outputs.items()}
