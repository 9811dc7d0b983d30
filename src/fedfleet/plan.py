"""What a run would do: sizes, blocks, messages and memory, without running it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedfleet import resolve
from fedfleet.config import named
from fedfleet.experiment import Experiment
from fedfleet.simulator import tree as T


def describe(x: Experiment) -> Iterator[tuple[str, str]]:
    """Yield (what, value) lines."""
    e, invite = x.config.executor, x.config.cohort.invite
    sizes = x.population.num_examples(torch.arange(x.problem.clients))
    floats, model_bytes = T.count(x.z), T.num_bytes(x.z)
    block = resolve.block_size(x.config)
    yield (
        "run",
        f"{x.label}: {named(x.config, 'algorithm')} on {named(x.config, 'task')}, {x.config.population.dataset}",
    )
    yield "rounds, seed", f"{x.config.rounds}, {x.config.seed}"
    yield "clients", f"{x.problem.clients:,} with {int(sizes.min())} to {int(sizes.max())} examples each"
    yield "model", f"{floats:,} floats ({_parts(x)}), {model_bytes / 1e6:.2f} MB"
    yield "phases a round", ", ".join(p.name for p in x.algorithm.phases)
    yield (
        "cohort",
        f"{invite} invited a phase, respond: {x.config.cohort.respond}, availability: {named(x.config, 'availability')}",
    )
    yield "blocks a phase", f"up to {-(-invite // block)} of {block} clients"
    where = f"{resolve.actors(x.config)} Ray actors of {e.cpus_per_actor:g} CPUs and {e.gpus_per_actor:g} GPUs"
    yield (
        "executor",
        f"{where if e.kind == 'ray' else 'this process'}, {e.inner}, {e.threads_per_actor} threads, {e.device}",
    )
    a_block = block * model_bytes * (4 if e.inner == "batched" else 1)
    yield "memory of a block", f"about {a_block / 1e6:.1f} MB of parameters and gradients"
    models = invite * model_bytes * len(x.algorithm.phases)
    yield "traffic a round", f"about {models / 1e6:.1f} MB up, at least as much down, if all answer"


def _parts(x: Experiment) -> str:
    return ", ".join(f"{part} {T.count(tree):,}" for part, tree in x.z.items())
