"""Convolutions whose filters differ from client to client, on a CPU: ``python -m benchmarks.convolutions``.

Layers of two nets, forward and backward, in turns: one client at a time; all at once as one convolution with a group a client; and
as batched products with unfolded patches. Then the gradients by filters that see one channel, as the engine finds them.

With ``--device cuda``: the same layers and some of larger nets, as one convolution with a group a client, and as the engine's
batched products, forward and by the inputs; all launches at once, as in a CUDA graph, so that the GPU alone is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command
from benchmarks.blocks import spread, told
from benchmarks.gpu.device import MODES, leave_without
from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.arithmetic import convolution
from fedfleet.simulator.arithmetic.convolution import Geometry, Patches

LAYERS = {"lenet, 1": (1, 6, 5, 28), "lenet, 2": (6, 16, 5, 12), "cnn, 1": (3, 32, 3, 32), "cnn, 2": (32, 64, 3, 30)}
"""Channels in and out, side of the filters and of the images; of all but first layers a gradient by the inputs is taken, too."""
BATCH = 10
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
ONE_CHANNEL = [(8, 3, 14), (32, 3, 28), (6, 5, 28), (16, 5, 28), (32, 5, 28)]
"""Channels out, side of the filters and of the images."""
ALONE = "one client at a time"
Way = Callable[[Tensor, Tensor], Tensor]


def alone(x: Tensor, filters: Tensor) -> Tensor:
    """Return outputs (C, B, o, H', W') for inputs (C, B, c, H, W) and filters (C, o, c, k, k)."""
    return torch.stack([F.conv2d(a, f) for a, f in zip(x, filters, strict=True)])


def grouped(x: Tensor, filters: Tensor) -> Tensor:
    """Return the same by one convolution."""
    out = F.conv2d(x.transpose(0, 1).flatten(1, 2), filters.flatten(0, 1), groups=len(x))
    return out.view(len(out), len(x), -1, *out.shape[2:]).transpose(0, 1)


def patches(x: Tensor, filters: Tensor) -> Tensor:
    """Return the same by batched products."""
    side = x.shape[-1] - filters.shape[-1] + 1
    unfolded = F.unfold(x.flatten(0, 1), filters.shape[-1]).view(*x.shape[:2], -1, side * side)
    return (filters.flatten(2)[:, None] @ unfolded).view(*x.shape[:2], -1, side, side)


def gradients(way: Way, x: Tensor, filters: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient by the filters, and by the inputs where they ask for it, given that by the outputs."""
    of = [t.detach().requires_grad_(t.requires_grad) for t in (filters, x)]
    return torch.autograd.grad(way(of[1], of[0]), [t for t in of if t.requires_grad], d)


WAYS: dict[str, Way] = {ALONE: alone, "groups": grouped, "patches": patches}


def inputs(layer: str, clients: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, filters and output gradients of a layer."""
    c, o, k, side = LAYERS[layer]
    out = side - k + 1
    return (
        torch.randn(clients, BATCH, c, side, side, requires_grad=not layer.endswith("1")),
        torch.randn(clients, o, c, k, k, requires_grad=True),
        torch.randn(clients, BATCH, o, out, out),
    )


def in_turns(
    ways: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float]
) -> list[dict[str, float]]:
    """Return for each turn the milliseconds of each way, by a clock."""
    times: list[dict[str, float]] = []
    for _ in range(turns):
        times.append({})
        for name, way in ways.items():
            started = clock()
            way()
            times[-1][name] = 1000 * (clock() - started)
    return times


def measure(layer: str, clients: int, turns: int) -> dict[str, object]:
    """Return medians in milliseconds, and how many times as long as one client at a time each way takes."""
    given = inputs(layer, clients)
    times = in_turns({name: partial(gradients, way, *given) for name, way in WAYS.items()}, turns, time.perf_counter)
    return {
        "layer": layer,
        "clients": clients,
        "ms": {name: median(t[name] for t in times) for name in WAYS},
        "over": {name: spread([t[name] / t[ALONE] for t in times]) for name in WAYS if name != ALONE},
    }


def of_filters(o: int, k: int, side: int, clients: int, turns: int) -> list[object]:
    """Return a row: milliseconds of torch, one client at a time, and of the engine over that, by processor time."""
    out = side - k + 1
    x, d = torch.randn(clients, BATCH, 1, side, side), torch.randn(clients, BATCH, o, out, out)
    ours = Patches(x, d, torch.Size((o, 1, k, k)), Geometry((1, 1), (0, 0), (1, 1), 1))
    filters = torch.randn(o, 1, k, k, requires_grad=True)
    outs = [F.conv2d(a, filters) for a in x]
    ways: dict[str, Callable[[], object]] = {
        ALONE: lambda: [torch.autograd.grad(y, filters, g, retain_graph=True) for y, g in zip(outs, d, strict=True)],
        "engine": ours.each,
    }
    times = in_turns(ways, turns, time.thread_time)
    over = spread([t["engine"] / t[ALONE] for t in times])
    return [f"1 to {o}, {k} x {k}, images of {side}", str(clients), median(t[ALONE] for t in times), told(over)]


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
                    for products in (False, True):
                        with patch.object(convolution, "_products", lambda *_, is_so=products: is_so):
                            row.append(replayed(way, turns))
                yield row


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.convolutions", __doc__)
    ask.add_argument("--clients", action="append", type=command.count, help="a block, repeated; default 8 and 64")
    ask.add_argument("--turns", type=command.count, default=31, help="of each (default %(default)d)")
    ask.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default cpu)")
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    if args.device == "cuda":
        if args.clients or args.json:
            ask.error("--device cuda has layers of its own, and prints a table: leave out --clients and --json")
        leave_without("cuda")
        ways = [f"{what} by {way}, ms" for what in ("outputs", "gradients by inputs") for way in ("groups", "products")]
        columns = ["layer", "clients", "precision", *ways]
        command.show("Convolutions with filters of each client's own, on a GPU", columns, list(on_gpu(args.turns)))
        return
    found = [measure(layer, clients, args.turns) for layer in LAYERS for clients in args.clients or (8, 64)]
    filters = [of_filters(*layer, n, args.turns) for layer in ONE_CHANNEL for n in args.clients or (8, 64)]
    if args.json:
        print(json.dumps({"machine": command.machine(), "layers": found, "one_channel": filters}))
        return
    rows = [
        [r["layer"], str(r["clients"]), *r["ms"].values(), *(told(over) for over in r["over"].values())]  # pyright: ignore
        for r in found
    ]
    ways = list(WAYS)
    columns = ["layer", "clients", *(f"{way}, ms" for way in ways), *(f"{way} over the first" for way in ways[1:])]
    command.show("Convolutions with filters of each client's own", columns, rows)
    columns = ["filters", "clients", f"{ALONE}, ms", "the engine over that"]
    command.show("Gradients by filters that see one channel, processor time", columns, filters)


if __name__ == "__main__":
    main()
