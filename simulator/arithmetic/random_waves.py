"""Random waves, between which inner products approach a sum of Gaussian kernels.

Rahimi & Recht, "Random features for large-scale kernel machines", NeurIPS 2007.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key

KERNELS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)
"""The g of DomainBed's kernel, the sum of exp(-g |x - y|^2)."""


def waves(key: Key, width: int, each: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return frequencies (width, M) and shifts (M,) of ``each`` random waves a kernel, whose mean product is the kernel."""
    rates = torch.tensor(KERNELS, dtype=dtype, device=key.device).repeat_interleave(each)
    frequencies = rng.normal(rng.fold(key, "frequencies"), (width, len(rates)), dtype) * (2 * rates).sqrt()
    return frequencies, rng.uniform(rng.fold(key, "shifts"), len(rates), dtype) * (2 * math.pi)


def in_waves(features: Tensor, frequencies: Tensor, shifts: Tensor) -> Tensor:
    """Return features (B, width) as (B, M), between which inner products approach the kernel."""
    return torch.cos(features @ frequencies + shifts) * math.sqrt(2 * len(KERNELS) / len(shifts))
