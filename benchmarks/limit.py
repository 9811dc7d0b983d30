"""Limit of arithmetic, the speed of large products on these cores: ``python -m benchmarks.limit --processes 2``.

``of_update`` counts the operations of a client's training, so that a speed can be given as a share of the limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import command
from benchmarks.peers import workload
from benchmarks.peers.workload import Case

WIDE = {"cuda": 8192, "cpu": 1024}
SECONDS = 2.0  # of products, where processes work at once


def flop(net: nn.Module, inputs: Tensor) -> float:
    """Return the floating-point operations of an example, forward and backward; inputs (B, ...)."""
    with FlopCounterMode(display=False) as counter:
        net(inputs).sum().backward()
    return counter.get_total_flops() / len(inputs)


def of_update(case: Case) -> float:
    """Return the floating-point operations of a client update of FedAvg's, in the layers of the net."""
    return flop(workload.net(case), torch.randn(2, *case.shape)) * case.samples * case.epochs


def reached(device: str, wide: int, seconds: float = 0.0) -> float:
    """Return the floating-point operations a second of large products on the device: the best of five, and of so many seconds."""
    a = torch.randn(wide, wide, device=device)
    found, began = [], time.perf_counter()
    while len(found) < 6 or time.perf_counter() - began < seconds:
        synchronise(device)
        started = time.perf_counter()
        torch.matmul(a, a)
        synchronise(device)
        found.append(time.perf_counter() - started)
    return 2 * wide**3 / min(found[1:])


def synchronise(device: str) -> None:
    """Wait for what a CUDA device has yet to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def together(processes: int) -> float:
    """Return the floating-point operations a second of so many processes at once, of one thread each."""
    ask = [sys.executable, "-m", "benchmarks.limit", "--processes", "1"]
    running = [subprocess.Popen(ask, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(json.loads(p.communicate()[0])["flop_per_s"] for p in running)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.limit", __doc__)
    ask.add_argument("--processes", type=command.count, default=1, help="at once (default %(default)d)")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    found = reached("cpu", WIDE["cpu"], SECONDS) if args.processes == 1 else together(args.processes)
    print(json.dumps({"processes": args.processes, "flop_per_s": found}))


if __name__ == "__main__":
    main()
