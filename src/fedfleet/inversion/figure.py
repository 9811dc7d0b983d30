"""Examples of a client beside what was rebuilt of them from what it sent."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from fedfleet.report.canvas import DPI, PALETTE

COLUMNS, ROWS = 10, 3  # of pairs


def draw(originals: Tensor, result: Tensor, numbers: Mapping[str, Any]) -> bytes:
    """Return a PNG of originals (n, ...) above what was rebuilt of them: images, or features as lines.

    ``numbers`` are those of ``inversion.json``; of a sum, the client's own examples come first.
    """
    examples = numbers["examples"]
    order = sorted(range(len(examples)), key=lambda i: examples[i]["client"] != numbers["client"])[: COLUMNS * ROWS]
    columns, rows = min(COLUMNS, len(order)), -(-len(order) // COLUMNS)
    figure = Figure(figsize=(max(3.0, 1.1 * columns), 2.7 * rows + 0.4), layout="constrained")
    panels = figure.subplots(2 * rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    low, high = numbers["range"]
    for place, i in enumerate(order):
        row, column = divmod(place, COLUMNS)
        for below, x in enumerate((originals[i], result[i])):
            panel = panels[2 * row + below, column]
            values = (x.double().numpy() - low) / ((high - low) or 1.0)
            if values.ndim == 3 and values.shape[0] in (1, 3):
                panel.imshow(np.clip(values, 0, 1).transpose(1, 2, 0).squeeze(), cmap="gray", vmin=0, vmax=1)
            else:
                panel.plot(values.ravel(), color=PALETTE[below], linewidth=0.8)
                panel.set_ylim(-0.05, 1.05)
        other = "" if examples[i]["client"] == numbers["client"] else f", client {examples[i]['client']}"
        panels[2 * row, column].set_title(f"label {examples[i]['label']}{other}", fontsize=7)
        panels[2 * row + 1, column].set_title(f"{examples[i]['psnr']:.1f} dB", fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
