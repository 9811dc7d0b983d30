"""Decision boundaries: how likely a model takes each class to be everywhere on a plane, beside some test examples.

Examples must have two numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedfleet.datasets.examples import fixed_draw
from fedfleet.simulator.algorithm import Task
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.work import Batch

POINTS = 800
"""Test examples that are kept, at most."""
GRID = 101
"""Places along each axis."""
MARGIN = 0.05
"""Of the range of the test examples, added on each side."""
LEAST = 1e-30
"""What is less likely counts as this."""


def decision_boundary(task: Task, z: Tree, test: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return points and what a model says of the plane around them; None where examples are not points, or nothing is likely.

    "x" (n, 2), "y" (n,) and, where there are domains, "domain" (n,) are test examples; "axes" (2, g) the places along both inputs,
    and "log_probability" (g, g, classes) is float32, second input first, as images have their rows.
    """
    guess = getattr(task, "probabilities", None)
    if guess is None or test["x"].shape[1:] != (2,):
        return None
    x = test["x"].double()
    low, high = x.amin(0), x.amax(0)
    low, high = low - MARGIN * (high - low), high + MARGIN * (high - low)
    axes = torch.stack([torch.linspace(float(a), float(b), GRID) for a, b in zip(low, high, strict=True)])
    second, first = torch.meshgrid(axes[1], axes[0], indexing="ij")
    places = torch.stack([first.flatten(), second.flatten()], 1).to(test["x"].dtype)
    with torch.no_grad():
        batch = Batch({"x": places, "y": torch.zeros(len(places), dtype=torch.int64)}, torch.ones(len(places)))
        likely = guess(task.functions["predict"](z, batch).double())
    rows = fixed_draw(len(x), POINTS)
    points = {name: test[name][rows].contiguous() for name in ("x", "y", "domain") if name in test}
    said = likely.clamp(min=LEAST).log().float().view(GRID, GRID, -1).contiguous()
    return {**points, "axes": axes, "log_probability": said}
