"""Turn a checked configuration into one that can run: every ``auto`` replaced by a fixed rule, every number possible.

The rules look at the configuration and the model, never at the number of workers or at a clock, so that one configuration
means one result.
"""

from __future__ import annotations

import os
from typing import Any

from fedfleet.config import Config, options
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.errors import ConfigError

BATCHED_UP_TO = 65_536
"""Floats of a model above which, on a CPU, many clients' weights no longer stay in the cache and batching loses."""


def cpus() -> int:
    """Return the CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_early(config: Config) -> None:
    """Refuse what needs no data to be refused. Raises ConfigError."""
    invite, clients = config.cohort.invite, config.population.clients
    if invite > clients:
        raise ConfigError(
            f"cohort.invite={invite}: there are only {clients} clients: lower it or raise population.clients"
        )
    respond = config.cohort.respond
    if isinstance(respond, int) and respond > invite:
        raise ConfigError(
            f"cohort.respond={respond}: only cohort.invite={invite} clients are invited: lower it or raise invite"
        )
    if config.cohort.min_responses > invite:
        raise ConfigError(
            f"cohort.min_responses={config.cohort.min_responses}: only cohort.invite={invite} clients are invited: lower it"
        )
    if config.cohort.response_low > config.cohort.response_high:
        raise ConfigError(
            f"cohort.response_low={config.cohort.response_low}: above response_high={config.cohort.response_high}: lower it"
        )
    if config.seeds is not None and (not config.seeds or len(set(config.seeds)) < len(config.seeds)):
        raise ConfigError(f"seeds={config.seeds}: give at least one seed, each once")
    _check_executor(config)
    if config.until is not None:
        parse_until(config.until)


def _check_executor(config: Config) -> None:
    e = config.executor
    if isinstance(e.block_size, int) and e.block_size < 1:
        raise ConfigError(f"executor.block_size={e.block_size}: a block has at least 1 client")
    if e.kind == "ray":
        if isinstance(e.actors, int) and e.actors < 1:
            raise ConfigError(f"executor.actors={e.actors}: at least 1 actor is needed")
        if e.address is None and isinstance(e.actors, int) and e.actors * e.cpus_per_actor > cpus():
            raise ConfigError(
                f"executor.actors={e.actors}: with cpus_per_actor={e.cpus_per_actor:g} they need {e.actors * e.cpus_per_actor:g} "
                f"CPUs, and this machine has {cpus()}: lower actors or cpus_per_actor (it may be fractional)"
            )
        if e.address is None and e.cpus_per_actor > cpus():
            raise ConfigError(f"executor.cpus_per_actor={e.cpus_per_actor:g}: this machine has {cpus()} CPUs: lower it")
    if e.address is None and device(config) == "cuda":
        import torch

        have = torch.cuda.device_count()
        wanted = e.gpus_per_actor * (actors(config) if e.kind == "ray" else 1)
        if have == 0 or wanted > have:
            key = "executor.gpus_per_actor" if e.gpus_per_actor else "executor.device"
            value = f"{e.gpus_per_actor:g}" if e.gpus_per_actor else e.device
            raise ConfigError(
                f"{key}={value}: this machine has {have} CUDA devices: lower it, or set executor.device=cpu"
            )


def device(config: Config) -> str:
    """Return "cpu" or "cuda"."""
    if config.executor.device != "auto":
        return config.executor.device
    return "cuda" if config.executor.gpus_per_actor > 0 else "cpu"


def actors(config: Config) -> int:
    """Return the number of Ray actors."""
    e = config.executor
    return max(1, int(cpus() / e.cpus_per_actor)) if e.actors == "auto" else e.actors


def inner(config: Config, floats: int) -> str:
    """Return "serial" or "batched" for a model of so many floats: batched on a GPU and for small models."""
    if config.executor.inner != "auto":
        return config.executor.inner
    return "batched" if device(config) == "cuda" or floats <= BATCHED_UP_TO else "serial"


def block_size(config: Config) -> int:
    """Return the clients a block: about eight blocks a cohort, of 4 to 64 clients."""
    if config.executor.block_size != "auto":
        return config.executor.block_size
    return min(64, max(4, -(-config.cohort.invite // 8)))


def resolved(config: Config, floats: int) -> Config:
    """Return the configuration with every ``auto`` replaced."""
    found = {
        "device": device(config),
        "inner": inner(config, floats),
        "block_size": block_size(config),
        "actors": actors(config),
    }
    return config.model_copy(update={"executor": config.executor.model_copy(update=found)})


def check_pairing(config: Config, algorithm: Algorithm, task: Task) -> None:
    """Refuse an algorithm on a task that lacks what it needs. Raises ConfigError."""
    missing = [p for p in algorithm.requires if p not in task.parts]
    if missing:
        what = {"x": "primal", "y": "dual"}
        raise ConfigError(
            f"algorithm.name={config.algorithm['name']!r}: it needs a task with a {what.get(missing[0], missing[0])} part, and "
            f"task.name={config.task['name']!r} has none: choose a minimax task (auc), or a minimisation algorithm (fedavg)"
        )


def check_batch(config: Config, largest: int) -> None:
    """Refuse batches that no client could fill. Raises ConfigError."""
    chosen: Any = options(config, "algorithm")
    size = getattr(chosen, "batch_size", None)
    if size is not None and size > largest:
        raise ConfigError(
            f"algorithm.batch_size={size}: the largest client has {largest} examples: use at most that, or fewer population.clients"
        )


def parse_until(text: str) -> tuple[str, bool, float]:
    """Return (metric, whether to stop when it is at least the value, the value). Raises ConfigError.

    ``=`` means at least, and at most for a metric called a loss; ``>=`` and ``<=`` say it outright.
    """
    for sign in (">=", "<=", "="):
        metric, found, value = text.partition(sign)
        if found:
            try:
                return metric.strip(), sign == ">=" or (sign == "=" and "loss" not in metric), float(value)
            except ValueError:
                break
    raise ConfigError(f"until={text!r}: write a metric and a number, such as eval/auc=0.95")
