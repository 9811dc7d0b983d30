"""torch's settings of this process, as they are in a fresh one: what a caller has set around a run changes nothing of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """Settings of a process that computes on a GPU.

    Attributes:
        deterministic: with algorithms that give the same bits each time; torch refuses an operation that has none.
        tf32: products and convolutions of float32 may round what they multiply to TF32, which has 10 bits of mantissa.

    """

    deterministic: bool = True
    tf32: bool = False

    def take(self, device: str) -> None:
        """Have this process compute so, if it computes on a GPU."""
        if device != "cuda":
            return
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or products are none of the deterministic ones
        torch.use_deterministic_algorithms(self.deterministic)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010, a property that types do not show
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32


EXACT = Gpu()
"""To the bit, unless somebody asks for less."""


@contextmanager
def fresh_settings() -> Iterator[None]:
    """Compute as a worker that has just been started does, and bring the caller's settings back.

    Shut out are autocast, inference mode, no_grad, the default dtype and device, the precision of products and convolutions of
    float32 and deterministic algorithms. Workers on Ray never see them, so that a run in this process would come to something else.
    """
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_float32_matmul_precision("highest")
        stack.callback(torch.set_float32_matmul_precision, precision)
        torch.use_deterministic_algorithms(mode=False)
        stack.callback(torch.use_deterministic_algorithms, strict, warn_only=warns)
        for module, name in (
            (torch.backends.cudnn, "allow_tf32"),
            (torch.utils.deterministic, "fill_uninitialized_memory"),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
        yield
