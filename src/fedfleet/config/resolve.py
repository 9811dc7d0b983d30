"""Turn a checked configuration into one that can run: every ``auto`` replaced by a fixed rule, every number possible.

The rules look at the configuration and the model, never at the number of workers or at a clock, so that one configuration
means one result.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from collections.abc import Callable, Iterable
from typing import Literal

import torch

from fedfleet.algorithms.options import AlgorithmOptions, CohortOptions
from fedfleet.config import rules
from fedfleet.config.checking import unknown
from fedfleet.config.platforms import check_ray, without_ray
from fedfleet.config.schema import Config
from fedfleet.datasets.examples import Examples
from fedfleet.simulator.algorithm import Algorithm, Task
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.compiled import compiler
from fedfleet.simulator.driver.evaluation import less_is_better
from fedfleet.simulator.errors import ConfigError, one_line, show
from fedfleet.tracking.registry import check_installed

ROW_BYTES = 64
"""Memory of a row of a client's schedule: its number, weight and random bits, and copies of them on the way."""


def cpus() -> int:
    """Return the CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_early(config: Config) -> None:
    """Refuse what needs no data to be refused. Raises ConfigError."""
    for key in ("seeds", "compare", "vary"):
        if (value := getattr(config, key)) is not None:
            raise ConfigError(
                f"{key}={show(value)}: it asks for several runs, and an Experiment is one: call fedfleet.run_all, use "
                f"`fedfleet run`, or leave it out"
            )
    _check_cohort(config.cohort)
    _check_executor(config)
    if config.until is not None:
        parse_until(config.until)
    check_installed(config.track)


def _check_cohort(c: CohortOptions) -> None:
    if isinstance(c.wait_for, int) and c.wait_for > c.size:
        raise ConfigError(
            f"cohort.wait_for={c.wait_for}: only cohort.size={c.size} clients are invited: lower it, or raise cohort.size"
        )
    if c.response_low > c.response_high:
        raise ConfigError(
            f"cohort.response_low={c.response_low}: above cohort.response_high={c.response_high}: lower it"
        )
    if c.min_responses > c.fewest:
        raise ConfigError(
            f"cohort.min_responses={c.min_responses}: a phase may go on after {c.fewest} answers: lower it"
        )


def _check_compiled(config: Config) -> None:
    e, timeout_s = config.executor, config.faults.client_timeout_s
    if e.capture != "compiled":
        return
    what, fix = "executor.capture=compiled", "set it to true"
    if e.inner == "serial":
        raise ConfigError(f"{what}: with executor.inner=serial no blocks are captured: {fix}, or choose batched")
    if timeout_s is not None:
        raise ConfigError(f"{what}: under faults.client_timeout_s={timeout_s:g} no blocks are captured: {fix}")
    if compiler() is None:
        raise ConfigError(f"{what}: torch needs a C++ compiler, and neither $CXX, g++ nor clang++ is there: {fix}")


def _check_device(config: Config) -> None:
    """Refuse what does not go with the device, wherever the actors are."""
    e = config.executor
    if device(config) == "cuda":
        if e.kind == "ray" and not e.gpus_per_actor:
            raise ConfigError(
                "executor.device=cuda: actors on Ray see no GPU without executor.gpus_per_actor: give it, or set kind=local"
            )
        return
    if not e.deterministic or e.tf32:
        what = "tf32=True" if e.tf32 else "deterministic=False"
        raise ConfigError(f"executor.{what}: it is of a GPU: set executor.gpus_per_actor, or leave it out")
    if e.gpus_per_actor:
        raise ConfigError(
            f"executor.gpus_per_actor={e.gpus_per_actor:g}: with executor.device=cpu nothing is computed on them: leave one out"
        )


def _check_executor(config: Config) -> None:
    e = config.executor
    _check_compiled(config)
    _check_device(config)
    if e.kind == "ray":
        check_ray("executor.kind='ray'")
    if e.kind == "local" and config.faults.client_timeout_s is not None:
        raise ConfigError(
            f"faults.client_timeout_s={config.faults.client_timeout_s:g}: with executor.kind=local clients run in this process, "
            f"which cannot be stopped: set executor.kind=ray, or leave it out"
        )
    if e.kind == "local" and e.allow_differences:
        raise ConfigError(
            "executor.allow_differences=True: with executor.kind=local there is no other machine: set executor.kind=ray, or leave "
            "it out"
        )
    if e.kind == "local" and e.address is not None:
        raise ConfigError(
            f"executor.address={e.address!r}: with executor.kind=local no cluster is joined: set executor.kind=ray, or "
            f"executor.address=null"
        )
    if e.node_silence_s is not None and e.address is None:
        raise ConfigError(
            f"executor.node_silence_s={e.node_silence_s:g}: without executor.address there is one node alone: give the "
            f"address of a cluster, or leave it out"
        )
    if e.memory_per_actor_gb is not None and e.address is None:
        raise ConfigError(
            f"executor.memory_per_actor_gb={e.memory_per_actor_gb:g}: without executor.address there is one node, whose memory "
            f"its actors share as they need it: give the address of a cluster, or leave it out"
        )
    if e.gpus_per_actor > 1 and not e.gpus_per_actor.is_integer():
        raise ConfigError(f"executor.gpus_per_actor={e.gpus_per_actor:g}: above 1 it must be whole: round it")
    if e.address is not None:
        return _check_address(e.address)  # what the cluster has is known once Ray has joined it
    if e.kind != "local":
        if e.cpus_per_actor > cpus():
            raise ConfigError(f"executor.cpus_per_actor={e.cpus_per_actor:g}: this machine has {cpus()} CPUs: lower it")
        if isinstance(e.actors, int) and e.actors * e.cpus_per_actor > cpus():
            raise ConfigError(
                f"executor.actors={e.actors}: with executor.cpus_per_actor={e.cpus_per_actor:g} they need "
                f"{e.actors * e.cpus_per_actor:g} CPUs, and this machine has {cpus()}: lower actors or cpus_per_actor (it may "
                f"be fractional)"
            )
    if device(config) == "cpu":
        return
    if gpus() == 0 or e.gpus_per_actor > gpus():
        by_key = e.gpus_per_actor > 0
        key, value = ("gpus_per_actor", f"{e.gpus_per_actor:g}") if by_key else ("device", e.device)
        fix = "lower it" if by_key and gpus() else "set executor.gpus_per_actor=0 and executor.device=cpu"
        raise ConfigError(f"executor.{key}={value}: this machine has {gpus()} GPUs: {fix}")
    if e.kind != "local" and isinstance(e.actors, int) and e.actors > (room := _gpu_room(e.gpus_per_actor)):
        raise ConfigError(
            f"executor.actors={e.actors}: with executor.gpus_per_actor={e.gpus_per_actor:g} only {room:g} fit on the {gpus()} "
            f"GPUs of this machine: lower actors or gpus_per_actor (it may be fractional)"
        )


def _check_address(address: str) -> None:
    """Refuse a cluster that does not answer; Ray itself would try for minutes."""
    if address == "auto":
        return
    if address.startswith("ray://"):
        raise ConfigError(
            f"executor.address={address!r}: Ray Client lets nothing but calls through, and rounds take more: run on a node of the "
            f"cluster, as `ray job submit -- fedfleet run CONFIG executor.address=auto` does"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as e:
        raise ConfigError(
            f"executor.address={address!r}: no Ray cluster answers there ({one_line(e)}): give host:port, start one with "
            f"`ray start --head`, or leave the address out"
        ) from None


def gpus() -> int:
    """Return the GPUs of this machine."""
    return torch.cuda.device_count()


def _gpu_room(each: float) -> float:
    """Return how many actors the GPUs can take; Ray never splits one actor's share of a GPU over two."""
    if each == 0:
        return math.inf
    return gpus() * math.floor(1 / each) if each <= 1 else gpus() // each


def device(config: Config) -> str:
    """Return "cpu" or "cuda"."""
    if config.executor.device != "auto":
        return config.executor.device
    return "cuda" if config.executor.gpus_per_actor > 0 else "cpu"


def actors(config: Config) -> int | Literal["auto"]:
    """Return the number of Ray actors; "auto" on a cluster, which has as many as there is room for, and more as nodes join."""
    e = config.executor
    if e.actors != "auto" or e.address is not None:
        return e.actors
    return max(1, int(min(cpus() / e.cpus_per_actor, _gpu_room(e.gpus_per_actor))))


def resolved(config: Config, cohort: int, phases: int, z: Tree, notes: Callable[[], Notes]) -> Config:
    """Return the configuration with every ``auto`` of the executor replaced, for so many clients at once and phases a round."""
    e, where = config.executor, device(config)
    inner = rules.inner(z, notes(), where) if e.inner == "auto" else e.inner
    size = rules.block_size(cohort, z, notes(), where) if e.block_size == "auto" else e.block_size
    kind = e.kind
    if kind == "auto":
        asks = e.of_ray or config.faults.client_timeout_s is not None
        blocks = phases * math.ceil(cohort / size)
        alone = without_ray() is not None or cohort <= size or rules.small(config.rounds, cohort, blocks, z, notes)
        kind = "local" if not asks and (alone or where == "cuda") else "ray"  # actors are given a GPU by name
        if asks:
            check_ray("executor.kind='auto'")
    result = {"kind": kind, "device": where, "inner": inner, "block_size": size, "actors": actors(config)}
    whole = config.model_copy(update={"executor": e.model_copy(update=result)})
    _check_compiled(whole)
    return whole


def check_pairing(config: Config, algorithm: Algorithm, task: Task) -> None:
    """Refuse an algorithm on a task that lacks what it needs. Raises ConfigError."""
    missing = [p for p in algorithm.requires if p not in task.parts]
    if missing:
        what = {"x": "primal", "y": "dual"}
        fix = "choose a minimax task (auc), or a minimisation algorithm (fedavg)"
        raise ConfigError(
            f"algorithm.name={config.algorithm.name!r}: it needs a task with a {what.get(missing[0], missing[0])} part, and "
            f"task.name={config.task.name!r} has none: {'set task.name=two_heads' if missing[0] == 'head' else fix}"
        )
    options = config.algorithm
    rate = options.given_dual_lr() if isinstance(options, AlgorithmOptions) else None
    if "y" not in task.parts and rate is not None:
        raise ConfigError(f"algorithm.dual_lr={rate:g}: task.name={config.task.name!r} has no dual part: leave it out")
    if algorithm.minimises and "y" in task.parts:
        raise ConfigError(
            f"algorithm.name={config.algorithm.name!r}: it minimises, and task.name={config.task.name!r} has a dual "
            f"part: choose a minimisation task (classification), or a minimax algorithm (local_sgda)"
        )
    if not (config.cohort.resample or algorithm.same_cohort or len(algorithm.phases) == 1):
        raise ConfigError(
            f"cohort.resample=false: {config.algorithm.name} draws the cohort of each of its phases by itself: leave it out"
        )


def unlabelled(algorithm: Algorithm, task: Task) -> bool:
    """Say whether examples without labels are of use."""
    return algorithm.roles or getattr(task, "unlabelled", False)


def check_roles(config: Config, algorithm: Algorithm, task: Task) -> None:
    """Refuse targets where they mean nothing, and their want where something is learnt from them. Raises ConfigError."""
    target, name = config.domains.asked, config.algorithm.name
    if not target and unlabelled(algorithm, task):
        what = f"algorithm.name={name!r}" if algorithm.roles else f"task.name={config.task.name!r}"
        raise ConfigError(
            f"{what}: it is for domains with labels and others without, and no domain is a target: set domains.target"
        )
    if target and algorithm.domains is not None:
        raise ConfigError(
            f"domains.target={show(config.domains.target)}: {name} learns on domains with labels: leave it out, and choose the "
            f"sources by population.dataset.domains"
        )


def check_domains(config: Config, test: Examples, domains: int) -> None:
    """Refuse what an algorithm over domains cannot be unbiased with. Raises ConfigError."""
    several = test.domain is not None and len(test.domain.unique()) > 1
    if several and domains == 1 and config.domains.kind == "given":
        raise ConfigError(
            f"population.partition={config.population.partition.kind!r}: clients hold examples of several domains: use "
            f"by_domain at a heterogeneity above 0, or domains.kind=label"
        )


def check_proven(config: Config, algorithm: Algorithm) -> None:
    """Refuse steps that are made for another number of rounds. Raises ConfigError."""
    if algorithm.rounds not in (None, config.rounds):
        proven = isinstance(config.algorithm, AlgorithmOptions) and config.algorithm.proven
        key = "theory.rounds" if proven else "rounds"
        raise ConfigError(f"algorithm.{key}={algorithm.rounds}: the run has rounds={config.rounds}: make them the same")


def check_local(config: Config, largest: int) -> None:
    """Refuse batches that no client could fill, and what this machine has no memory for. Raises ConfigError."""
    options = config.algorithm
    data = options.local_data() if isinstance(options, AlgorithmOptions) else None
    if data is None:
        return
    size = largest if data.batch_size is None else data.batch_size
    if size > largest and size != data.usual:  # by default a batch is at most what a client has
        raise ConfigError(
            f"algorithm.batch_size={size}: the largest client has {largest} examples: use at most that, or fewer "
            f"population.clients"
        )
    rows = size * data.steps if data.steps else largest * (data.epochs or 1)
    block = config.executor.block_size
    together = min(rules.SIZES[device(config)].largest if block == "auto" else block, config.cohort.size)
    if together * rows * ROW_BYTES > memory_bytes():
        key, value = ("steps", data.steps) if data.steps else ("epochs", data.epochs)
        raise ConfigError(f"algorithm.{key}={value}: the memory of this machine does not hold their batches: lower it")


def check_model(config: Config, floats: int) -> None:
    """Refuse a model that is too large for this machine: itself, its update, its gradient and a client's. Raises ConfigError."""
    if 4 * 4 * floats > memory_bytes():
        raise ConfigError(
            f"task.name={config.task.name!r}: 4 copies of its model of {floats:,} floats do not fit in the "
            f"{memory_bytes() / 1e9:.0f} GB of this machine: use a smaller task.model"
        )


def parse_until(text: str, key: str = "until") -> tuple[str, bool, float]:
    """Return (metric, whether to stop when it is at least the value, the value). Raises ConfigError.

    ``=`` means at least, and at most for a metric of which less is better; ``>=`` and ``<=`` say it outright.
    """
    result = re.fullmatch(r"\s*(eval/.*?)\s*(>=|<=|=)(.*)", text)
    with contextlib.suppress(ValueError):
        if result and math.isfinite(float(result[3])):
            return (
                result[1],
                result[2] == ">=" or (result[2] == "=" and not less_is_better(result[1])),
                float(result[3]),
            )
    if re.fullmatch(r"\s*(?!eval/)[\w/.]+\s*(>=|<=|=)\s*[\d.e+-]+\s*", text):
        raise ConfigError(f"{key}={show(text)}: metrics of the model are called eval/…: write eval/{text.strip()}")
    raise ConfigError(f"{key}={show(text)}: write a metric and a number, such as eval/auc=0.95")


def looked_at(config: Config) -> dict[str, str | None]:
    """Return by key the metrics that a run goes by, to end or to keep a model; None where it does not."""
    return {
        "until": config.until and parse_until(config.until)[0],
        "patience.metric": config.patience and config.patience.metric,
        "checkpoint.best": config.checkpoint.best,
    }


def check_metrics(config: Config, metrics: Callable[[], Iterable[str]]) -> None:
    """Refuse to look for a metric that is never measured. Raises ConfigError."""
    for key, metric in looked_at(config).items():
        if metric not in (None, "auto") and metric not in (known := list(metrics())):
            raise ConfigError(unknown(key, metric, known))
