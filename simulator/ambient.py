"""torch's settings of this process, as they are in a fresh one: what a caller has set around a run changes nothing of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fedfleet.simulator.errors import ConfigError


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


NEWER = hasattr(torch._C, "_get_fp32_precision_getter")
"""Whether torch has a precision for each library and operation: from 2.9 on."""
PRECISIONS = (
    {
        ("generic", "all"): "none",
        **{(library, what): "none" for library in ("mkldnn", "cuda") for what in ("all", "conv", "rnn", "matmul")},
        ("cuda", "conv"): "tf32",
        ("cuda", "rnn"): "tf32",
    }
    if NEWER
    else {}
)
"""Precision of float32 in a fresh process, by library and operation, the general before what follows it."""
FLAGS = (
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
)
CHOSEN: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)
"""Ways to compute attention, also on a CPU: whether each may be taken, and what says so. All may in a fresh process."""
DENORMAL = 1e-40
MODULES = vars(torch.nn.modules.module)
HOOKS: list[dict[int, Any]] = [
    MODULES[name] for name in MODULES if name.startswith("_global_") and name.endswith("_hooks")
]
"""Functions that are called for every module of the process, such as those of ``register_module_forward_hook``."""


@contextmanager
def fresh_settings() -> Iterator[None]:
    """Compute as a worker that has just been started does, and bring the caller's settings back.

    Shut out are autocast, inference mode, no_grad, the default dtype and device, the precision of products and convolutions of
    float32, deterministic algorithms, oneDNN put out of use, ways to compute attention and the order of ``einsum``, numbers near 0
    that are flushed, hooks of what is saved for gradients, and hooks of all modules. Workers on Ray never see them, so that a run
    in this process would come to something else. Modes that see every operation are refused. Raises ConfigError.
    """
    if (mode := _mode()) is not None:
        raise ConfigError(
            f"{mode} is around the run, and workers on Ray would not have it: end it before, or put it into client code"
        )
    dtype = torch.get_default_dtype()
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        _without_saving_hooks(stack)
        for hooks in HOOKS:
            stack.callback(hooks.update, dict(hooks))
            hooks.clear()
        stack.enter_context(torch.enable_grad())
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(_precision_again, *_full_precision())
        _deterministic(strict=False, warns=False)
        stack.callback(_deterministic, strict=strict, warns=warns)
        for module, name in FLAGS:
            stack.callback(_flag_again, module, name, getattr(module, name))
        for enabled, enable in CHOSEN:
            stack.callback(enable, enabled())
            enable(True)
        _order_of_einsum(stack)
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(True)
        if float(torch.tensor([DENORMAL]) + 0) == 0:
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        yield


def _order_of_einsum(stack: ExitStack) -> None:
    """Have products of several tensors taken in the order that a fresh process takes, until the stack unwinds."""
    order = torch.backends.opt_einsum
    for name, fresh in (("enabled", order.is_available()), ("strategy", "auto" if order.is_available() else None)):
        stack.callback(setattr, order, name, getattr(order, name))
        setattr(order, name, fresh)


def _without_saving_hooks(stack: ExitStack) -> None:
    """Take away ``saved_tensors_hooks`` that are around, such as ``save_on_cpu``, until the stack unwinds."""
    hooks = vars(torch._C)["_autograd"]
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        hooks._pop_saved_tensors_default_hooks()
        stack.callback(hooks._push_saved_tensors_default_hooks, *top)


def _deterministic(*, strict: bool, warns: bool) -> None:
    """Set deterministic algorithms, if they are not so: torch imports its compiler for it, which takes seconds."""
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (strict, warns):
        torch.use_deterministic_algorithms(strict, warn_only=warns)


def _flag_again(module: object, name: str, value: object) -> None:
    if getattr(module, name) != value:  # to set cudnn.allow_tf32 is to set its convolutions, whatever is set above them
        setattr(module, name, value)


def _full_precision() -> tuple[str, dict[tuple[str, str], str]]:
    """Have float32 computed in full, and return what was set: by torch's older way, and by its newer one where it has it."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer one, which the older does not know
        older = "highest"
    newer = {}
    for at, fresh in PRECISIONS.items():  # below what is fresh, each reads as itself
        newer[at] = torch._C._get_fp32_precision_getter(*at)
        if newer[at] != fresh:
            torch._C._set_fp32_precision_setter(*at, fresh)
    if older != "highest":
        torch.set_float32_matmul_precision("highest")
        for at in PRECISIONS:
            if at[1] == "matmul":  # which it has set, too
                torch._C._set_fp32_precision_setter(*at, PRECISIONS[at])
    return older, newer


def _precision_again(older: str, newer: dict[tuple[str, str], str]) -> None:
    _full_precision()
    if older != "highest":
        torch.set_float32_matmul_precision(older)
    for at, value in reversed(newer.items()):
        if torch._C._get_fp32_precision_getter(*at) != value:
            torch._C._set_fp32_precision_setter(*at, value)


def _mode() -> str | None:
    """Return the name of a mode that sees, and may change, every operation; None where there is none but a default device."""
    result = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return next((type(mode).__name__ for mode in result if not isinstance(mode, DeviceContext)), None)
