"""Beneath ``vmap``: the tensors of all clients of a block, from inside the code of one.

``torch.func.vmap`` runs client code once, on tensors that stand for one client and hold those of all. The engine reaches
through them: ``lower`` gives the whole tensor, ``lift`` hides one again, and in ``beneath`` operations see whole tensors.
An ``autograd.Function`` with a ``vmap`` rule is the public way to do this, and costs twenty times as much a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter, temporarily_pop_interpreter_stack

functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def left_as_they_were() -> Iterator[None]:
    """End the transforms that an interruption in their first or last lines leaves behind, for all that the process runs later."""
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        raise


def level() -> int | None:
    """Return the level of the ``vmap`` that the caller runs under, None where there is none."""
    return functorch.maybe_current_level() if torch._C._are_functorch_transforms_active() else None


def differentiated() -> bool:
    """Say whether the caller runs under one of ``torch.func``'s own derivatives, where nothing can be reached beneath."""
    if not torch._C._are_functorch_transforms_active():
        return False
    kinds = (interpreter.key() for interpreter in functorch.get_interpreter_stack())
    return any(kind != functorch.TransformType.Vmap for kind in kinds)


def clients() -> int | None:
    """Return the number of clients that ``vmap`` runs, None outside."""
    if level() is None:
        return None
    interpreter: Any = retrieve_current_functorch_interpreter()
    return interpreter.batch_size()


def is_batched(t: Tensor) -> bool:
    """Say whether a tensor of client code differs from client to client."""
    return functorch.is_batchedtensor(t)


def lower(t: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor beneath, and whether it has a first axis of clients; one that all clients share has none."""
    at = level()
    if at is None or not functorch.is_batchedtensor(t):
        return t, False
    value, axis = functorch._unwrap_batched(t, at)
    return (value, False) if axis is None else (value.movedim(axis, 0) if axis else value, True)


def lift(t: Tensor) -> Tensor:
    """Return client code's view of a tensor whose first axis is clients; the tensor itself outside ``vmap``."""
    at = level()
    return t if at is None else functorch._add_batch_dim(t, 0, at)


def beneath() -> AbstractContextManager[object]:
    """Operate on whole tensors inside this context."""
    return nullcontext() if level() is None else temporarily_pop_interpreter_stack()
