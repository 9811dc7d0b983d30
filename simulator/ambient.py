"""torch's settings of this process, as they are in a fresh one: what a caller has set around a run changes nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def fresh_settings() -> Iterator[None]:
    """Compute as a worker that has just been started does, and bring the caller's settings back.

    Shut out are autocast, inference mode, no_grad, the default dtype and device, the precision of products of float32 and
    deterministic algorithms. Workers on Ray never see them, so that a run in this process would come to something else.
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
        yield
