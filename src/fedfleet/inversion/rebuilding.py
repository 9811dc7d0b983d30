"""Rebuild examples from what a client sent, by looking for such as would have made it send the same; and say how alike they are.

Zhu, Liu & Han, "Deep leakage from gradients", NeurIPS 2019 (DLG); Zhao, Mopuri & Bilen, "iDLG: improved deep leakage from
gradients", 2020; Geiping, Bauermeister, Dröge & Moeller, "Inverting gradients: how easy is it to break privacy in federated
learning?", NeurIPS 2020, Eq. 4 and Proposition 3.1; of a batch's labels Wainakh et al., "User-level label leakage from gradients",
PETS 2022, here with the client's own code in the place of their estimate of what a label adds; SSIM: Wang, Bovik, Sheikh &
Simoncelli, 2004.

    paper            here
    x, y             examples (n, ...), labels (n,)
    grad L(x, y)     ``simulate(x, y)`` (d,), of all numbers that are sent
    grad L(x*, y*)   ``observed`` (d,)
    alpha            tv

    cosine    1 - <simulate(x, y), observed> / (|simulate(x, y)| |observed|) + alpha TV(x), by signed Adam
    dlg       |simulate(x, y) - observed|^2 / |observed|^2, by L-BFGS; labels are given, as in iDLG
    closed    x = sum_i db_i dW_i / sum_i db_i^2, of one example and a first layer W x + b
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.signals import imported

Simulate = Callable[[Tensor, Tensor], Tensor]
Method = Literal["cosine", "dlg", "closed"]
Tell = Callable[[int, int, float], None]
"""Told the restart, the iteration and the distance."""
RATE = 0.05  # of signed Adam, as a share of the range of the examples: 0.1 for pixels in [-1, 1]
FALLS = (3 / 8, 5 / 8, 7 / 8)  # of the iterations, where the rate falls to a tenth
WINDOW, SPREAD = 11, 1.5  # of SSIM, pixels


class How(NamedTuple):
    """How is looked: ``iterations`` of each of ``restarts``, and the weight ``tv`` of total variation (images, cosine)."""

    method: Method
    iterations: int
    tv: float
    restarts: int


class Found(NamedTuple):
    """Examples (n, ...) that were found, and the distance (0 best) of what they make a client send."""

    x: Tensor
    distance: float


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 - the cosine of the angle between two vectors."""
    return 1 - torch.dot(a, b) / (a.norm() * b.norm()).clamp(min=1e-30)


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|^2 / |b|^2."""
    return (a - b).square().sum() / b.square().sum().clamp(min=1e-30)


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours in images (n, c, h, w), down and across."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


def guess(shape: tuple[int, ...], low: float, high: float, key: Key, dtype: torch.dtype) -> Tensor:
    """Return noise to begin with: normal around the middle of the range, a quarter of it wide, cut off at its ends."""
    drawn = rng.normal(key, shape, torch.float64) * (high - low) / 4 + (low + high) / 2
    return drawn.clamp(low, high).to(dtype)


def rebuilt(
    simulate: Simulate,
    observed: Tensor,
    shape: tuple[int, ...],
    y: Tensor,
    box: tuple[float, float],
    how: How,
    key: Key,
    tell: Tell = lambda restart, iteration, distance: None,
) -> Found:
    """Return the examples of ``shape`` (n, ...), within the range ``box``, of the restart that came nearest."""
    search, best = {"cosine": _by_angle, "dlg": _by_length}[how.method], None
    for restart in range(how.restarts):
        start = guess(shape, *box, rng.fold(key, "restart", restart), observed.dtype)
        result = search(simulate, observed, start, y, box, how, lambda i, d, r=restart: tell(r, i, d))
        if best is None or not result.distance >= best.distance:
            best = result
    assert best is not None
    return best


def _by_angle(
    simulate: Simulate,
    observed: Tensor,
    start: Tensor,
    y: Tensor,
    box: tuple[float, float],
    how: How,
    tell: Callable[[int, float], None],
) -> Found:
    x = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=RATE * (box[1] - box[0]))
    falls = [round(f * how.iterations) for f in FALLS]
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, 0.1)
    for i in range(how.iterations):
        distance = cosine(simulate(x, y), observed)
        loss = distance + how.tv * total_variation(x) if how.tv else distance
        x.grad = torch.autograd.grad(loss, x)[0].sign()
        optimizer.step()
        rate.step()
        with torch.no_grad():
            x.clamp_(*box)
        tell(i, float(distance.detach()))
    return Found(x.detach(), float(cosine(simulate(x.detach(), y), observed)))


def _by_length(
    simulate: Simulate,
    observed: Tensor,
    start: Tensor,
    y: Tensor,
    box: tuple[float, float],
    how: How,
    tell: Callable[[int, float], None],
) -> Found:
    x = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x])
    least = Found(start, float("inf"))

    def loss() -> Tensor:
        distance = euclidean(simulate(x, y), observed)
        x.grad = torch.autograd.grad(distance, x)[0]
        return distance

    for i in range(how.iterations):
        before = x.detach().clone()
        distance = float(optimizer.step(loss).detach())  # pyright: ignore[reportArgumentType] # of before the step
        if not distance < float("inf"):  # it has run away
            break
        if distance < least.distance:
            least = Found(before, distance)
        tell(i, distance)
    return least._replace(x=least.x.clamp(*box))


def closed_form(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the example (d,) whose layer's weights moved by (h, d) and biases by (h,), whatever came after: it is exact.

    Of one example every step moves the weights by the biases' move times the example (Proposition 3.1); with noise it is the
    example of least squares.
    """
    return bias @ weight / bias.square().sum().clamp(min=1e-30)


def inferred(observed: Tensor, by_label: Tensor, n: int) -> Tensor:
    """Return n labels, rising, from how the biases of the last layer moved (c,), and would for each label alone (c, c).

    Of one example the label whose move has the least angle to the one seen, which without noise is iDLG's, the only one whose bias
    rises. Of more, counts in proportion to a linear combination of the moves, rounded by largest remainders.
    """
    if n == 1:
        return F.cosine_similarity(by_label, observed[None]).argmax()[None]
    # To move all labels alike moves nothing, so that the shares' sum is to be said besides, as strongly.
    ones = by_label.norm(dim=1).mean().double().expand(1, len(by_label))
    moves, seen = torch.cat([by_label.T.double(), ones]), torch.cat([observed.double(), ones[0, :1]])
    shares = torch.linalg.lstsq(moves, seen[:, None], driver="gelsd").solution[:, 0]
    shares = shares.clamp(min=0)
    shares = shares / shares.sum() if float(shares.sum()) > 0 else torch.full_like(shares, 1 / len(shares))
    counts = (n * shares).floor()
    missing = n - int(counts.sum())
    counts[(n * shares - counts).argsort(descending=True, stable=True)[:missing]] += 1
    return torch.arange(len(shares)).repeat_interleave(counts.long())


def matched(originals: Tensor, result: Tensor) -> Tensor:
    """Return which rebuilt example (m, ...) stands for each original (n, ...), int64 (n,): of least squared error in all."""
    linear_sum_assignment = imported("scipy.optimize").linear_sum_assignment  # here, for it takes its time

    a, b = originals.double().flatten(1), result.double().flatten(1)
    cost = torch.cdist(a, b).square()
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1])


def squared_errors(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean squared error (n,) float64 of each example."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(errors: Tensor, width: float) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of mean squared errors, of examples whose range is so wide."""
    return 10 * torch.log10(width**2 / errors.clamp(min=1e-20))


def ssim(a: Tensor, b: Tensor, width: float) -> Tensor:
    """Return the structural similarity (n,) of images (n, c, h, w) of at least 11 x 11 pixels, in Gaussian windows."""
    a, b = a.double(), b.double()
    at = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    line = torch.exp(-at.square() / (2 * SPREAD**2))
    window = torch.outer(line, line) / line.sum() ** 2

    def blurred(v: Tensor) -> Tensor:
        return F.conv2d(v.flatten(0, 1)[:, None], window[None, None]).view(*v.shape[:2], -1)

    c1, c2 = (0.01 * width) ** 2, (0.03 * width) ** 2
    p, q = blurred(a), blurred(b)
    aa, bb, ab = blurred(a * a) - p * p, blurred(b * b) - q * q, blurred(a * b) - p * q
    return ((2 * p * q + c1) * (2 * ab + c2) / ((p * p + q * q + c1) * (aa + bb + c2))).flatten(1).mean(1)
