"""What a caller has set around a run changes nothing of it."""

from contextlib import contextmanager

import torch
from torch import nn

import fedfleet
from fedfleet.simulator.ambient import EXACT, Gpu, fresh_settings
from fedfleet.tasks import from_module

CONFIG = {
    "rounds": 1,
    "population": {"clients": 5},
    "cohort": {"invite": 2},
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


AROUND = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "all others": all_others,
}


def test_a_run_is_the_same_whatever_surrounds_it(subtests, tmp_path):
    def make():
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 10)
        )

    plain = fedfleet.run(CONFIG, task=from_module(make), out=tmp_path / "plain")
    for name, around in AROUND.items():
        with subtests.test(name):
            with around():
                settings = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
                run = fedfleet.run(CONFIG, task=from_module(make), out=tmp_path / name)
                assert (
                    torch.get_default_dtype(),
                    torch.is_grad_enabled(),
                    torch.is_inference_mode_enabled(),
                ) == settings
            for file in ("model.safetensors", "clients.parquet"):
                assert (run.folder / file).read_bytes() == (plain.folder / file).read_bytes()
            assert run.summary["final"] == plain.summary["final"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        longer = fedfleet.resume(run.folder, {"rounds": 2}, task=from_module(make))
    whole = fedfleet.run(CONFIG, {"rounds": 2}, task=from_module(make), out=tmp_path / "whole")
    assert (longer.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


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
