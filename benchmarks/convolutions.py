"""Convolutions whose filters differ from client to client: ``python -m benchmarks.convolutions``.

For layers of several shapes the outputs and both gradients, in each of the engine's ways, in turns, by processor time: one client
at a time, one convolution with a group a client, batched products with patches. A star marks the way that the engine takes.
Gradients by filters that a block shares are summed over clients, by one call of torch or by products.

    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 python -m benchmarks.convolutions

does the same as on a processor without AVX-512.

With ``--device cuda``: other layers, as one convolution with a group a client, and as the engine's batched products, forward and
by the inputs; all launches at once, as in a CUDA graph, so that the GPU alone is timed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import command
from benchmarks import turns as turns_of
from benchmarks.blocks import spread, told
from benchmarks.gpu.device import MODES, leave_without
from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.arithmetic import convolution
from fedfleet.simulator.arithmetic.convolution import Geometry, Of, Patches, Way
from fedfleet.simulator.executors.worker import prepare

LAYERS = {
    "1 to 6, 5 x 5, 28 (LeNet)": (1, 6, 5, 28, 1, 0),
    "6 to 16, 5 x 5, 12 (LeNet)": (6, 16, 5, 12, 1, 0),
    "1 to 32, 5 x 5, 28, padded": (1, 32, 5, 28, 1, 2),
    "32 to 64, 5 x 5, 14, padded": (32, 64, 5, 14, 1, 2),
    "1 to 8, 3 x 3, 14": (1, 8, 3, 14, 1, 0),
    "3 to 32, 3 x 3, 32": (3, 32, 3, 32, 1, 0),
    "8 to 16, 5 x 5, 12": (8, 16, 5, 12, 1, 0),
    "16 to 16, 3 x 3, 32, padded": (16, 16, 3, 32, 1, 1),
    "16 to 32, 3 x 3, 16, stride 2": (16, 32, 3, 16, 2, 1),
    "16 to 32, 1 x 1, 32, stride 2": (16, 32, 1, 32, 2, 0),
    "32 to 32, 3 x 3, 8, padded": (32, 32, 3, 8, 1, 1),
    "32 to 64, 3 x 3, 30": (32, 64, 3, 30, 1, 0),
    "64 to 64, 3 x 3, 4, padded": (64, 64, 3, 4, 1, 1),
}
"""Channels in and out, side of the filters and of the images, stride, padding."""
ON_GPU = {
    "lenet, 2": (200, 10, 6, 16, 5, 12, 1, 0),
    "cnn, 1": (50, 10, 3, 32, 3, 32, 1, 0),
    "cnn, 2": (50, 10, 32, 64, 3, 30, 1, 0),
    "64 to 64": (200, 10, 64, 64, 3, 8, 1, 1),
    "64 to 128": (8, 64, 64, 128, 3, 16, 1, 1),
    "256 to 256": (8, 64, 256, 256, 3, 8, 1, 1),
    "64 to 64, large": (16, 32, 64, 64, 3, 32, 1, 1),
    "64 to 128, stride 2": (16, 32, 64, 128, 3, 32, 2, 1),
    "64 to 128, 1x1": (16, 32, 64, 128, 1, 32, 2, 0),
}
"""Clients, batch, channels in and out, side of the filters and of the images, stride, padding."""
SHARED = "shared filters"
WHAT: dict[str, Of] = {"outputs": "outputs", "filters": "filters", SHARED: "filters", "inputs": "inputs"}
"""Names of all that is timed, and what the engine's rule calls it."""
ALONE = "alone"
Find = Callable[[], Tensor]


def problem(layer: str, clients: int, batch: int) -> tuple[dict[str, Find], dict[str, Way]]:
    """Return for a layer how the engine finds each of ``WHAT``, and the way that its rule takes.

    Outputs are (C, B, o, H', W'), gradients (C, o, c, k, k) by filters, (o, c, k, k) summed over clients for shared ones, and
    (C, B, c, H, W) by inputs.
    """
    channels, out, k, side, stride, padding = LAYERS[layer]
    geometry, shape = Geometry((stride, stride), (padding, padding), (1, 1), 1), torch.Size((out, channels, k, k))
    x, filters = torch.randn(clients, batch, channels, side, side), torch.randn(clients * out, channels, k, k)
    d = torch.randn_like(convolution.convolve(x, filters, geometry, own=True)).contiguous()
    patches = Patches(x, d, shape, geometry)
    finds: dict[str, Find] = {
        "outputs": lambda: convolution.convolve(x, filters, geometry, own=True),
        "filters": patches.each,
        SHARED: patches.summed,
        "inputs": lambda: convolution.input_gradient(d, x, filters, geometry, own=True),
    }
    return finds, {what: convolution.way(of, shape, geometry, x) for what, of in WHAT.items()}


def found_by(way: Way, find: Find) -> Tensor:
    """Return what the engine finds in one of its ways, in order in memory."""
    with patch.object(convolution, "way", lambda *_: way):
        return find().contiguous()


def measure(layer: str, clients: int, batch: int, turns: int) -> Iterator[dict[str, Any]]:
    """Yield for each of ``WHAT`` the milliseconds of processor time one client at a time, and the other ways over that.

    Shared filters need no ways of their own: they are one call of torch, or products.
    """
    finds, taken = problem(layer, clients, batch)
    for what, find in finds.items():
        ways = {way: partial(found_by, way, find) for way in get_args(Way) if what != SHARED or way != "groups"}
        times = turns_of.processor(ways, turns)
        over = {way: spread([t[way] / t[ALONE] for t in times]) for way in ways if way != ALONE}
        row = {"layer": layer, "clients": clients, "batch": batch, "what": what, "rule": taken[what]}
        yield {**row, "ms": median(t[ALONE] for t in times), "over": over}


def cells(row: Mapping[str, Any]) -> list[str | float]:
    """Return a row of the table; a star marks the way that the engine takes."""
    ratios = {way: told(over) + "*" * (way == row["rule"]) for way, over in row["over"].items()}
    alone = f"{row['ms']:.3g}" + "*" * (row["rule"] not in ratios)
    return [row["layer"], row["what"], alone, *(ratios.get(way, "") for way in get_args(Way)[1:])]


def replayed(way: Callable[[], Tensor], turns: int) -> float:
    """Return the milliseconds that the GPU takes for what ``way`` launches."""
    way()
    torch.cuda.synchronize()
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        kept = way()
    found = []
    for _ in range(turns):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    del kept
    return median(found)


def on_gpu(turns: int) -> Iterator[list[str | float]]:
    """Return rows: for each layer and precision the milliseconds of groups and of the engine's products."""
    for mode in ("float32", "tf32"):
        with fresh_settings():
            MODES[mode].take("cuda")
            for layer, (clients, batch, c, o, k, side, stride, padding) in ON_GPU.items():
                geometry = Geometry((stride, stride), (padding, padding), (1, 1), 1)
                h = torch.randn(clients, batch, c, side, side, device="cuda")
                filters = torch.randn(clients * o, c, k, k, device="cuda")
                d = torch.randn_like(convolution.convolve(h, filters, geometry, own=True)).contiguous()
                row: list[str | float] = [layer, str(clients), mode]
                for way in (
                    lambda h=h, f=filters, g=geometry: convolution.convolve(h, f, g, own=True),
                    lambda h=h, f=filters, g=geometry, d=d: convolution.input_gradient(d, h, f, g, own=True),
                ):
                    for how in ("groups", "products"):
                        with patch.object(convolution, "way", lambda *_, how=how: how):
                            row.append(replayed(way, turns))
                yield row


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.convolutions", __doc__)
    ask.add_argument("--clients", type=command.count, help="a block (default 8)")
    ask.add_argument("--batch", type=command.count, help="a client's images (default 10)")
    ask.add_argument("--turns", type=command.count, default=15, help="of each (default %(default)d)")
    ask.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default cpu)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    prepare(1)  # as a worker is
    if args.device == "cuda":
        if args.clients or args.batch or args.json:
            ask.error(
                "--device cuda has layers of its own, and prints a table: leave out --clients, --batch and --json"
            )
        leave_without("cuda")
        ways = [f"{what} by {way}, ms" for what in ("outputs", "gradients by inputs") for way in ("groups", "products")]
        columns = ["layer", "clients", "precision", *ways]
        command.show("Convolutions with filters of each client's own, on a GPU", columns, list(on_gpu(args.turns)))
        return
    clients, batch = args.clients or 8, args.batch or 10
    found = [row for layer in LAYERS for row in measure(layer, clients, batch, args.turns)]
    if args.json:
        print(json.dumps({"machine": command.machine(), "layers": found}))
        return
    kind = torch.backends.cpu.get_cpu_capability()
    title = f"Convolutions of {clients} clients, {batch} images each, {kind} (* as the rule chooses)"
    columns = ["layer", "what", "one client at a time, ms", "groups over that", "products over that"]
    command.show(title, columns, [cells(row) for row in found])


if __name__ == "__main__":
    main()
