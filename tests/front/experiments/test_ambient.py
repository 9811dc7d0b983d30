"""Settings that a caller has made around a run change nothing of it."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fedfleet
from fedfleet.simulator.ambient import EXACT, PRECISIONS, Gpu, fresh_settings
from fedfleet.tasks import from_module
from tests.refusals import refused

CONFIG = {
    "rounds": 1,
    "population": {"clients": 5},
    "cohort": {"size": 2},
    "executor": {"kind": "local"},
    "evaluation": {"every": 1, "per_client": True},
}


@contextmanager
def setting(put, value, before):
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def all_others():
    with (
        torch.no_grad(),
        setting(torch.set_default_dtype, torch.float64, torch.float32),
        torch.device("meta"),
        setting(torch.set_float32_matmul_precision, "medium", "highest"),
        setting(torch.use_deterministic_algorithms, True, False),
    ):
        yield


@contextmanager
def flushing():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def strict():
    return warnings.catch_warnings(action="error")


def precisions():
    """Return what torch computes in, and what it would if all were set to TF32: some have settings of their own."""
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return None
    now = [torch._C._get_fp32_precision_getter(*at) for at in PRECISIONS]
    with setting(lambda value: torch._C._set_fp32_precision_setter("generic", "all", value), "tf32", now[0]):
        return now, [torch._C._get_fp32_precision_getter(*at) for at in PRECISIONS]


@contextmanager
def hooking():
    """Have all modules of the process changed as they are made, and what they are given and return."""
    everywhere = nn.modules.module
    made = [
        everywhere.register_module_forward_pre_hook(lambda module, x: (x[0] * 2,)),
        everywhere.register_module_forward_hook(lambda module, x, y: y * 1.5),
        everywhere.register_module_full_backward_hook(lambda module, inner, outer: tuple(inner)),
        everywhere.register_module_module_registration_hook(
            lambda module, name, part: nn.Identity() if isinstance(part, nn.ReLU) else None
        ),
        everywhere.register_module_parameter_registration_hook(lambda module, name, p: nn.Parameter(p.detach() * 2)),
    ]
    try:
        yield
        assert float(nn.Identity()(torch.ones(()))) == 3  # they are there again
    finally:
        for one in made:
            one.remove()


AROUND = {
    "hooks of all modules": hooking,
    "oneDNN out of use": lambda: torch.backends.mkldnn.flags(enabled=False),
    "halves by the newer way": lambda: setting(
        lambda value: setattr(torch.backends.mkldnn, "fp32_precision", value), "bf16", "none"
    ),
    "halves in products": lambda: setting(
        lambda value: setattr(torch.backends.mkldnn.matmul, "fp32_precision", value), "bf16", "none"
    ),
    "in full by the newer way": lambda: setting(
        lambda value: setattr(torch.backends, "fp32_precision", value), "ieee", "none"
    ),
    "numbers near 0 flushed": flushing,
    "warnings as errors": strict,
    "NumPy's errors": lambda: np.errstate(all="raise"),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "halves saved for gradients": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.bfloat16() if x.dtype == torch.float32 else x,
        lambda x: x.float() if x.dtype == torch.bfloat16 else x,
    ),
    "another order of products": lambda: setting(
        lambda value: setattr(torch.backends.opt_einsum, "enabled", value), False, torch.backends.opt_einsum.enabled
    ),
    "attention another way": lambda: sdpa_kernel(SDPBackend.MATH),
    "all others": all_others,
}


USUAL = ("autocast", "hooks of all modules", "inference mode", "another order of products", "all others")


class Products(nn.Module):
    """A product of three tensors, whose order decides the last bits, and attention."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 40)), nn.Parameter(torch.randn(40, 8))

    def forward(self, x):
        x = torch.einsum("ni,ij,jk->nk", x, self.a, self.b)
        rows = x.reshape(len(x), 2, 4)
        return nn.functional.scaled_dot_product_attention(rows, rows, rows).flatten(1)


@pytest.mark.parametrize("names", [USUAL, pytest.param([*AROUND], marks=pytest.mark.slow)], ids=len)
def test_a_run_is_the_same_whatever_surrounds_it(names, subtests, tmp_path):
    def make():
        return nn.Sequential(
            nn.Conv2d(1, 2, 3),
            nn.Flatten(),
            nn.Linear(72, 8),
            Products(),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(8, 10),
        )

    plain = fedfleet.run(CONFIG, task=from_module(make), out=tmp_path / "plain")
    for name in names:
        with subtests.test(name):
            with AROUND[name]():
                settings = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
                precise = precisions()
                run = fedfleet.run(CONFIG, task=from_module(make), out=tmp_path / name)
                assert (
                    torch.get_default_dtype(),
                    torch.is_grad_enabled(),
                    torch.is_inference_mode_enabled(),
                ) == settings
                assert precisions() == precise
            for file in ("model.safetensors", "clients.parquet"):
                assert (run.folder / file).read_bytes() == (plain.folder / file).read_bytes()
            assert run.summary["final"] == plain.summary["final"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        longer = fedfleet.resume(run.folder, {"rounds": 2}, task=from_module(make))
    whole = fedfleet.run(CONFIG, {"rounds": 2}, task=from_module(make), out=tmp_path / "whole")
    assert (longer.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


class Watching(TorchFunctionMode):
    pass


class Seeing(TorchDispatchMode):
    pass


def test_modes_that_see_every_operation_are_refused(tmp_path):
    for mode in (Watching(), Seeing()):
        with mode:
            refused(lambda: fedfleet.run(CONFIG, out=tmp_path / "run"), type(mode).__name__)
    assert not (tmp_path / "run").exists()


def test_what_a_gpu_is_told_goes_with_the_run(monkeypatch):
    """No GPU is needed: the settings are the process's."""
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn.allow_tf32
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for gpu in (EXACT, Gpu(deterministic=False, tf32=True)):
        with fresh_settings():
            gpu.take("cuda")
            assert torch.are_deterministic_algorithms_enabled() == gpu.deterministic
            assert torch.get_float32_matmul_precision() == ("high" if gpu.tf32 else "highest")
            assert torch.backends.cudnn.allow_tf32 == gpu.tf32
        assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == before
        assert torch.backends.cudnn.allow_tf32 == cudnn
    with fresh_settings():
        EXACT.take("cpu")
        assert not torch.are_deterministic_algorithms_enabled()
