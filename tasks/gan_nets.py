"""The generators and discriminators of CDMA's third experiment, for images of 28 x 28 (or 8 x 8) and of 64 x 64.

Normalisation is always by the batch at hand: nothing is remembered between batches, and rows that are padding do not count.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfleet.tasks.pooling import MaxPool2

LATENT = 100
EPS = 1e-5


class Norm(nn.Module):
    """Batch normalisation of (B, C) or (B, C, H, W) over the rows of weight 1; its affine parameters start at 1 and 0."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Normalise; ``real`` (B,) is 1 on real rows and 0 on padding."""
        over, shape = ((0,), (1, -1)) if x.dim() == 2 else ((0, 2, 3), (1, -1, 1, 1))
        rows = real.view(-1, *([1] * (x.dim() - 1)))
        count = real.sum().clamp(min=1.0) * (x[0, 0].numel())
        mean = (x * rows).sum(over, keepdim=True) / count
        centred = x - mean
        variance = (centred.square() * rows).sum(over, keepdim=True) / count
        return centred * (variance + EPS).rsqrt() * self.weight.view(shape) + self.bias.view(shape)


class SmallGenerator(nn.Module):
    """Linear, linear, two transposed convolutions: 100 numbers to (channels, side, side), side a multiple of 4."""

    def __init__(self, channels: int, side: int, width: float):
        super().__init__()
        wide, many, few = (max(1, round(width * n)) for n in (1024, 128, 64))
        self.shape = (many, side // 4, side // 4)
        self.linear1, self.norm1 = nn.Linear(LATENT, wide), Norm(wide)
        flat = many * (side // 4) ** 2
        self.linear2, self.norm2 = nn.Linear(wide, flat), Norm(flat)
        self.up1, self.norm3 = nn.ConvTranspose2d(many, few, 4, 2, 1), Norm(few)
        self.up2 = nn.ConvTranspose2d(few, channels, 4, 2, 1)

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        """Return images (B, channels, side, side) in [-1, 1]."""
        h = self.norm1(self.linear1(noise).relu(), real)
        h = self.norm2(self.linear2(h).relu(), real).view(-1, *self.shape)
        return self.up2(self.norm3(self.up1(h).relu(), real)).tanh()


class SmallDiscriminator(nn.Module):
    """Two convolutions with pooling, two linear layers."""

    def __init__(self, channels: int, side: int, width: float):
        super().__init__()
        few, many, wide = (max(1, round(width * n)) for n in (32, 64, 1024))
        self.padding = 0 if side >= 20 else 2
        left = side
        for _ in range(2):
            left = (left + 2 * self.padding - 4) // 2
        self.conv1, self.conv2, self.pool = nn.Conv2d(channels, few, 5), nn.Conv2d(few, many, 5), MaxPool2()
        self.linear1, self.linear2 = nn.Linear(many * left * left, wide), nn.Linear(wide, 1)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return logits (B,) of being real."""
        for conv in (self.conv1, self.conv2):
            x = self.pool(F.leaky_relu(F.conv2d(x, conv.weight, conv.bias, padding=self.padding)))
        return self.linear2(F.leaky_relu(self.linear1(x.flatten(1)))).squeeze(1)


class DcganGenerator(nn.Module):
    """DCGAN's: five transposed convolutions without bias, 100 numbers to (channels, 64, 64)."""

    def __init__(self, channels: int, side: int, width: float):
        super().__init__()
        sizes = [max(1, round(width * n)) for n in (512, 256, 128, 64)]
        self.up = nn.ModuleList([nn.ConvTranspose2d(LATENT, sizes[0], 4, 1, 0, bias=False)])
        for a, b in zip(sizes, [*sizes[1:], channels], strict=True):
            self.up.append(nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False))
        self.norm = nn.ModuleList([Norm(n) for n in sizes])

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        """Return images (B, channels, 64, 64) in [-1, 1]."""
        h, (*inner, last) = noise[:, :, None, None], self.up
        for up, norm in zip(inner, self.norm, strict=True):
            h = norm(up(h), real).relu()
        return last(h).tanh()


class DcganDiscriminator(nn.Module):
    """DCGAN's: five convolutions without bias."""

    def __init__(self, channels: int, side: int, width: float):
        super().__init__()
        sizes = [max(1, round(width * n)) for n in (64, 128, 256, 512)]
        self.down = nn.ModuleList(
            [nn.Conv2d(a, b, 4, 2, 1, bias=False) for a, b in zip([channels, *sizes[:-1]], sizes, strict=True)]
        )
        self.norm = nn.ModuleList([Norm(n) for n in sizes[1:]])
        self.last = nn.Conv2d(sizes[-1], 1, 4, 1, 0, bias=False)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return logits (B,) of being real."""
        first, *others = self.down
        x = F.leaky_relu(first(x), 0.2)
        for down, norm in zip(others, self.norm, strict=True):
            x = F.leaky_relu(norm(down(x), real), 0.2)
        return self.last(x).flatten()


def build(shape: tuple[int, ...], width: float, seed: int) -> tuple[nn.Module, nn.Module]:
    """Return a generator and a discriminator for images of a shape, their widths times ``width``, drawn from ``seed`` alone.

    Weights of linear layers and transposed convolutions of the small nets are Xavier-uniform, all others torch's default.
    Raises ValueError for shapes there are no nets for.
    """
    if len(shape) != 3 or shape[1] != shape[2] or (shape[1] != 64 and (shape[1] % 4 or not 8 <= shape[1] <= 32)):
        raise ValueError(f"images of shape {shape}: there are nets for square ones of 8, 12, ..., 32, or 64 pixels")
    channels, side, _ = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if side == 64:
            return DcganGenerator(channels, side, width), DcganDiscriminator(channels, side, width)
        generator, discriminator = SmallGenerator(channels, side, width), SmallDiscriminator(channels, side, width)
        for layer in (*generator.modules(), *discriminator.modules()):
            if isinstance(layer, nn.Linear | nn.ConvTranspose2d):
                nn.init.xavier_uniform_(layer.weight)
        return generator, discriminator
