"""Rate rules: how likely each client is online, a number p_c of its own that is drawn or reckoned once for a run.

    uniform   p_c ~ U[low, high)                                       drawn from the run's key and the client
    beta      p_c ~ Beta(a, b)                                         the same
    fedau     p_c = min(1, max(floor, mean L <nu_c, kappa>)),          kappa ~ Dirichlet(concentration 1_L), once
    fedawe    p_c = <nu_c, phi>,                                       phi_k ~ U[0, 1) for k < L // 2, else U[0, 1/2), once
    mifa      p_c = floor + (1 - floor) min(classes of c) / (L - 1)
    sizes     p_c = (1 / n_c) / max_j (1 / n_j)                        n_c examples; F3AST

with nu_c the shares of the L classes among the examples that client c really holds, after whatever partition.

Sources: FedAU, S. Wang and M. Ji, "A lightweight method for tackling unknown participation statistics in federated averaging",
ICLR 2024; FedAWE, M. Xiang et al., "Efficient federated learning against heterogeneous and non-stationary client unavailability",
NeurIPS 2024; MIFA, X. Gu et al., "Fast federated learning in the presence of arbitrary device unavailability", NeurIPS 2021;
F3AST, M. Ribero, H. Vikalo and G. de Veciana, "Federated learning under intermittent client availability and time-varying
communication constraints", 2022. As their code has it; FedAU's has no bound above, and fails where L > 10 brings a p_c above 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.fleet.online.labels import Labels
from fedfleet.simulator.population import Population

Rates = Callable[[Tensor], Tensor]
"""Clients (S,) int64 -> p (S,) float64 in [0, 1], of each client alone."""


def constant(rate: float) -> Rates:
    """Return one rate for all."""
    return lambda clients: torch.full(clients.shape, rate, dtype=torch.float64)


def uniform(key: Key, low: float, high: float) -> Rates:
    """Return rates from U[low, high)."""
    return lambda clients: low + (high - low) * rng.uniform(rng.fold(key, "rate", clients), (), torch.float64)


def beta(key: Key, a: float, b: float) -> Rates:
    """Return rates from Beta(a, b)."""

    def rates(clients: Tensor) -> Tensor:
        one, other = (log_gamma(rng.fold(key, "rate", clients, i), shape) for i, shape in enumerate((a, b)))
        return torch.sigmoid(one - other)

    return rates


def fedau(key: Key, labels: Labels, mean: float, floor: float, concentration: float) -> Rates:
    """Return FedAU's rates; for uniform label shares p_c is ``mean``."""
    kappa = dirichlet(rng.fold(key, "kappa"), labels.classes, concentration)
    weight = labels.mean_of(mean * labels.classes * kappa)
    return lambda clients: weight(clients).clamp(floor, 1.0)


def fedawe(key: Key, labels: Labels) -> Rates:
    """Return FedAWE's rates."""
    return labels.mean_of(phi(key, labels.classes))


def phi(key: Key, classes: int) -> Tensor:
    """Return FedAWE's rates of the classes (classes,) float64: those of the second half are half as large, on average."""
    every = torch.arange(classes)
    drawn = rng.uniform(rng.fold(key, "phi", every), (), torch.float64)
    return torch.where(every < classes // 2, drawn, drawn / 2)


def mifa(labels: Labels, floor: float) -> Rates:
    """Return MIFA's rates: clients that hold low classes are online less."""
    least, most = labels.least(), max(1, labels.classes - 1)
    return lambda clients: floor + (1 - floor) * least(clients) / most


def sizes(population: Population) -> Rates:
    """Return F3AST's rates: the smallest clients are always online, others in inverse proportion to their examples."""
    least = max(1, population.summary().min_examples)
    return lambda clients: least / population.num_examples(clients).clamp(min=least).to(torch.float64)


def dirichlet(key: Key, size: int, concentration: float) -> Tensor:
    """Return a draw (size,) float64 from the symmetric Dirichlet law."""
    return torch.softmax(log_gamma(rng.fold(key, torch.arange(size)), concentration), 0)


def log_gamma(keys: Key, shape: float) -> Tensor:
    """Return the logarithms (S,) float64 of draws from Gamma(shape, 1), one for each key (S,).

    G. Marsaglia and W. Tsang, "A simple method for generating gamma variables", ACM TOMS 26(3), 2000. Logarithms, since for a
    small shape most draws are below what float64 holds.
    """
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    c = 1 / (9 * d) ** 0.5
    result, left = torch.zeros(keys.shape, dtype=torch.float64), torch.arange(len(keys))
    attempt = 0
    while len(left):
        k = rng.fold(keys[left], attempt)
        x = rng.normal(rng.fold(k, "normal"), (), torch.float64)
        log_u = torch.log1p(-rng.uniform(rng.fold(k, "uniform"), (), torch.float64))
        v = (1 + c * x) ** 3
        log_v = torch.log(v.clamp(min=1e-300))
        taken = (v > 0) & (log_u < x**2 / 2 + d * (1 - v + log_v))
        result[left[taken]] = torch.log(torch.tensor(d, dtype=torch.float64)) + log_v[taken]
        left, attempt = left[~taken], attempt + 1
    if shape < 1:
        result += torch.log1p(-rng.uniform(rng.fold(keys, "less"), (), torch.float64)) / shape
    return result
