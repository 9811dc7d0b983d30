"""The picture of a partition: labels by client, sizes, domains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedfleet.report import canvas

ROWS = 100  # clients of the picture of labels, evenly spaced where there are more
NAMES = 30  # domains of the picture, at most
BARS = 40  # of the sizes


@dataclass(frozen=True)
class Holdings:
    """What clients hold: N clients, of which n have been asked for their sizes and m for their labels.

    Attributes:
        title: the data and how they were dealt.
        clients: N.
        sizes, domain: (n,) examples and domain of each.
        domains: the domains' names.
        targets: those of them whose labels are withheld.
        shown, domain_of_shown: (m,) the clients whose labels were counted, rising, and their domains.
        labels: (m, classes) how many examples of each label they have.
        test_labels: (classes,) test examples of each label.
        test_domains: test examples of each domain; None where these say none.
        names: (m,) what the clients shown are called, if anything.
        classes: what the labels are called, if anything.
        tested: whose the test examples are, in words, if anyone's.

    """

    title: str
    clients: int
    sizes: np.ndarray
    domain: np.ndarray
    domains: tuple[str, ...]
    targets: tuple[str, ...]
    shown: np.ndarray
    domain_of_shown: np.ndarray
    labels: np.ndarray
    test_labels: np.ndarray
    test_domains: np.ndarray | None
    names: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    tested: str = ""


def figure(seen: Holdings) -> Figure:
    """Return panels: labels by client, sizes, and domains where there are several."""
    several = len(seen.domains) > 1
    made, panels = canvas.panels(3 if several else 2, width=4.6, height=3.6)
    _labels(panels[0], seen)
    _sizes(panels[1], seen)
    if several:
        _domains(panels[2], seen)
    return made


def write(seen: Holdings, path: Path) -> None:
    """Write the picture as .svg or .png, the same bytes for the same holdings. Raises OSError."""
    canvas.write(lambda: figure(seen), path)


def _labels(axes: Axes, seen: Holdings) -> None:
    count = len(seen.shown)
    rows = np.unique(np.linspace(0, count - 1, min(count, ROWS)).round().astype(int))
    shares = seen.labels[rows] / np.maximum(seen.labels[rows].sum(1, keepdims=True), 1)
    image = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    axes.grid(visible=False)
    told = "" if len(rows) == seen.clients else f", {len(rows)} of {seen.clients:,}"
    axes.set_title("Labels by client")
    axes.set_xlabel("label")
    axes.set_ylabel(f"client{told}")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_yticks(ticks := np.unique(np.linspace(0, len(rows) - 1, min(len(rows), 6)).round().astype(int)))
    axes.set_yticklabels([str(seen.shown[rows[i]]) for i in ticks])
    axes.figure.colorbar(image, ax=axes, label="share of a client's examples")


def _sizes(axes: Axes, seen: Holdings) -> None:
    least, most = int(seen.sizes.min()), int(seen.sizes.max())
    width = max(1, -(-(most - least + 1) // BARS))
    edges = np.arange(least, most + 1 + width, width) - 0.5
    canvas.steps(axes, np.histogram(seen.sizes, edges)[0], edges, canvas.PALETTE[0], filled=True)
    axes.set_title("Sizes")
    axes.set_xlabel("examples of a client" + (f" (bins of {width})" if width > 1 else ""))
    axes.set_ylabel("clients")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _domains(axes: Axes, seen: Holdings) -> None:
    names = [canvas.plain(f"{n} (target)" if n in seen.targets else n) for n in seen.domains[:NAMES]]
    examples = np.bincount(seen.domain, seen.sizes, minlength=len(seen.domains))[: len(names)]
    place = np.arange(len(names))
    axes.barh(place - 0.2, examples, 0.4, color=canvas.PALETTE[0], label="training")
    if seen.test_domains is not None:
        axes.barh(place + 0.2, seen.test_domains[: len(names)], 0.4, color=canvas.PALETTE[1], label="test")
        axes.legend()
    axes.set_yticks(place, names)
    axes.invert_yaxis()
    more = f", {len(names)} of {len(seen.domains)}" if len(seen.domains) > len(names) else ""
    axes.set_title(f"Domains{more}")
    axes.set_xlabel("examples")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
