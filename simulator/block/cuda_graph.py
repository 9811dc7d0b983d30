"""Captured blocks as CUDA graphs: a GPU is told all operations of a block at once, instead of each by Python.

The kernels are those that the capture runs, on the same shapes, hence with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.tree import Tree


class CudaGraph:
    """A captured function, recorded by the GPU at ``given``: from such tensors to what it returns, as tensors of their own.

    Args:
        forward: the function; what it draws, reads of values, or takes from the CPU cannot be recorded.
        given: tensors on the GPU.
        pool: the ``CudaGraph`` whose memory it may share, since no two are replayed at once; None for memory of its own.

    Raises RuntimeError where something cannot be recorded, and OutOfMemoryError.

    """

    def __init__(self, forward: Callable[..., list[Tensor]], given: list[Tensor], pool: Any):
        self._given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
        self._fill(given)
        caller, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream), _refusing_to_wait():
            forward(*self._given)  # before it is recorded, libraries make what they keep
        caller.wait_stream(stream)
        self._fill(given)  # should it have written into them
        self._graph = torch.cuda.CUDAGraph()
        shared = None if pool is None else pool._graph.pool()
        with torch.cuda.graph(self._graph, pool=shared, stream=stream, capture_error_mode="thread_local"):
            self._result = forward(*self._given)

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Compute."""
        self._fill(list(given))
        self._graph.replay()
        return [t.clone() for t in self._result]

    def _fill(self, given: list[Tensor]) -> None:
        for mine, new in zip(self._given, given, strict=True):
            mine.copy_(new)


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise RuntimeError where an operation waits for the GPU, as those that read a value do."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def gpu_of(given: Tree) -> torch.device | None:
    """Return the GPU that all tensors of a tree are on; None where they are on none, or not on one."""
    devices = {x.device for x in T.leaves(given) if isinstance(x, Tensor)}
    return devices.pop() if len(devices) == 1 and all(d.type == "cuda" for d in devices) else None


def move(made: Any, device: torch.device) -> None:
    """Have a captured module take on the GPU what it would make or keep on the CPU, so that nothing is copied there each time."""
    graph: GraphModule = made
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            setattr(graph, node.target, getattr(graph, node.target).to(device))
        elif isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
