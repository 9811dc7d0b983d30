"""The plan of a run: sizes, blocks, messages and memory, without running it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from fedfleet.algorithms.options import AlgorithmOptions
from fedfleet.algorithms.wrapping import WrapperOptions
from fedfleet.assembly.executors import on_ray
from fedfleet.config import participation, rules, timing
from fedfleet.config.executor import Executor
from fedfleet.config.plugins import Place, places
from fedfleet.config.selection import asked
from fedfleet.experiments.disk_use import DiskUse, estimated
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.runner import HOW, where
from fedfleet.middleware.secure_aggregation import wrap as secured
from fedfleet.report.words import count, quantity, span
from fedfleet.simulator.algorithm import Buffer
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.fleet.hardware import HeterogeneousDevices
from fedfleet.simulator.registry import ByPath
from fedfleet.tasks.adapters import Adapted
from fedfleet.tasks.maker import Maker

SHORT = 8  # digits of a digest
OF_THEORY = ("lr", "dual_lr", "lr_schedule", "decay", "alpha")
"""Options that say nothing where constants of a theorem (``theory``) set the steps."""


def describe(x: Experiment) -> Iterator[tuple[str, str]]:
    """Yield (what, value) lines."""
    e, invite = x.config.executor, x.answers
    summary = x.population.summary()
    floats, model_bytes = T.count(x.z), T.num_bytes(x.z)
    block = int(e.block_size)
    label = "" if x.label == x.config.algorithm.name else f"{x.label}: "
    yield "run", f"{label}{x.config.algorithm.name} on {x.config.task.name}, {x.config.population.dataset.name}"
    yield "rounds, seed", f"{x.config.rounds}, {x.config.seed}"
    least, most = summary.min_examples, summary.max_examples
    yield "clients", f"{x.problem.clients:,} with {f'{least} to ' * (least < most)}{most} examples each"
    yield "tested on", x.examples["tested_on"]
    if told := x.advice():
        yield "advice", "\n".join(told)
    if x.root is not None:
        yield "examples of the server's own", f"{x.root.summary().max_examples:,}"
    if x.config.domains.asked:
        told = f"{x.config.domains.target}, without labels; {x.problem.clients} of {x.config.population.clients} clients take part"
        if x.problem.sources is not None and x.problem.targets is not None:
            told += f", {len(x.problem.sources)} with labelled examples, {len(x.problem.targets)} with unlabelled ones"
        yield "targets", told
    if x.algorithm.domains is not None and x.problem.domains is not None:
        sizes = x.problem.domains.examples
        yield (
            "domains",
            f"{len(sizes):,} with {int(sizes.min()):,} to {int(sizes.max()):,} examples each; skewness "
            f"{float(sizes.sum() / sizes.min()):,.3g}",
        )
    of = f" ({_parts(x)})" if len(x.z) > 1 else ""
    yield "model", f"{floats:,} parameters{of}, {model_bytes / 1e6:.3g} MB"
    if told := _filled(x):
        yield "told to the net", f"{told}, as the data have"
    if told := ", ".join(chosen(x.config.algorithm)):
        yield "algorithm", told
    yield "phases a round", ", ".join(p.name for p in x.algorithm.phases)
    if told := "; ".join(_steps(x)):
        yield "local steps", told
    match x.algorithm.asynchronous:
        case None:
            waits = f"invited a phase, wait_for: {x.config.cohort.wait_for}"
        case Buffer(seconds=None):
            waits = "answers a server step"
        case Buffer(seconds=seconds):
            waits = f"at work, a server step every {seconds:.3g} s"
    yield "cohort", f"{invite} {waits}, availability: {x.config.availability.kind}"
    if told := participation.spread(x.federation, x.population):
        yield "clients online", told
    yield "blocks a phase", f"up to {-(-invite // block)} of {block} clients"
    yield "executor", f"{where(x)}; {HOW[e.inner]} ({e.inner}), {count(e.threads_per_actor, 'thread')}, {e.device}"
    if e.kind == "ray" and e.address is not None:
        yield "nodes", "\n".join(_nodes(e, e.address, invite))
    yield "factored weights", _factored(x)
    a_block = block * model_bytes * (1 if e.inner == "serial" else 4)
    yield "memory of a block", f"about {a_block / 1e6:.1f} MB of parameters and gradients"
    models = invite * model_bytes * len(x.algorithm.phases)
    sent = {**{p.name: model_bytes for p in x.algorithm.phases}, **x.notes.bytes_up}  # some phases not every round has
    up, down = f"{invite * sum(sent.values()) / 1e6:.3g}", "at least as much"
    if x.config.transforms.up:
        yield "transforms up", ", ".join(t.name for t in x.config.transforms.up)
        down = f"at least {models / 1e6:.3g} MB"
    if x.config.transforms.down:
        yield "transforms down", ", ".join(t.name for t in x.config.transforms.down)
        mostly = x.config.transforms.down[0].name == "delta"  # less for those who were asked not long ago
        most = models if mostly else invite * sum(x.notes.bytes_down.values())
        down = f"{'at most ' * mostly}{most / 1e6:.3g} MB"
    invited = asked(x.config.cohort)
    for promise in x.promises:
        yield promise.key.replace("_", " "), promise.plan_text()
    if (told := secured.plan_text(x.config.secure_aggregation, x.algorithm, invited)) is not None:
        yield "secure aggregation", told
        up, down = (
            f"{invite * secured.sent_each(x.algorithm, invited) / 1e6:.3g}",
            "the models and what is said above",
        )
    yield "traffic a round", f"about {up} MB up, {down} down, if all answer"
    yield "disk", _disk(estimated(x))
    if mine := [f"{here.at}: {here.name}, {_told(here)}" for here in places(x.config)]:
        yield "code of one's own", "\n".join(mine)
    if x.attack is not None:
        yield "attack", f"{x.config.attack.kind} by {len(x.attack.attackers):,} of {x.problem.clients:,} clients"
    if isinstance(x.federation.devices, HeterogeneousDevices):
        seconds, parts = timing.typical(x.federation.devices, x.algorithm, x.problem, x.costs)
        if (buffer := x.algorithm.asynchronous) is not None:
            yield "server step, median device", f"{timing.between_steps(seconds, buffer, x.problem.clients)}: {parts}"
        else:
            middle = timing.middle(x.federation.devices, x.problem.clients)
            if more := secured.waits_s(x.algorithm, middle, x.problem.clients, invited):
                seconds, parts = seconds + more, f"{parts}, exchanges of secure aggregation and masks {more:.3g} s"
            yield "round, median device", f"{seconds:.3g} s: {parts}"


def as_dict(x: Experiment, lines: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a plan as plain data: figures, the lines of ``describe``, and the configuration with its defaults."""
    return {
        "clients": x.problem.clients,
        "cohort": x.answers,
        "floats": T.count(x.z),
        "model_bytes": T.num_bytes(x.z),
        "phases": [p.name for p in x.algorithm.phases],
        "lines": dict(lines),
        "config": x.config.model_dump(mode="json"),
    }


def _told(here: Place) -> str:
    """Say which code it is."""
    return here.part.version or f"source {str(here.part.source)[:SHORT]}"


def _filled(x: Experiment) -> str:
    """Say which arguments of the net nobody gave, but the data."""
    make = getattr(x.task, "make", None)
    make = make.plain if isinstance(make, Adapted) else make
    filled = make.filled if isinstance(make, Maker) else {}
    return ", ".join(f"{name} {value}" for name, value in filled.items())


def _steps(x: Experiment) -> Iterator[str]:
    """Say of each phase how many local steps clients take, on how many examples each."""
    works = {p.name: [stage.batches for stage in p.work.loops if stage.batches.works] for p in x.algorithm.phases}
    for name, steps in timing.local_steps(x.algorithm, x.population).items():
        sizes = {
            "all" if plan.size is None else f"{'about' if plan.drawn else 'up to'} {plan.size}" for plan in works[name]
        }
        yield f"{name}: {span(*steps)}, on {' and '.join(sorted(sizes))} examples"


def chosen(given: BaseModel) -> Iterator[str]:
    """Yield the options that count, each as text."""
    unsaid = OF_THEORY if isinstance(given, AlgorithmOptions) and given.proven else ()
    unsaid = (*unsaid, "source", "version") if isinstance(given, ByPath) else unsaid  # which another line says
    for name in (name for name in type(given).model_fields if name not in ("name", *unsaid)):
        value = getattr(given, name)
        if name == "of" and isinstance(given, WrapperOptions):
            yield f"of {given.of.name} ({', '.join(chosen(given.of))})"
        elif value is not None:
            yield f"{name} {_text(value)}"


def _text(value: Any) -> str:
    """Write an option; of options in it the first, and what is not as by default."""
    if not isinstance(value, BaseModel):
        return f"{value:g}" if isinstance(value, float) else str(value)
    (first, _), *rest = type(value).model_fields.items()
    more = [f"{k} {_text(v)}" for k, field in rest if (v := getattr(value, k)) != field.default and v is not None]
    return _text(getattr(value, first)) + (f" ({', '.join(more)})" if more else "")


def _nodes(e: Executor, address: str, invite: int) -> Iterator[str]:
    """Yield how many actors a cluster has room for and, a line a node, what would go there of a phase of so many clients."""
    nodes = on_ray("nodes")
    result = nodes.visit(
        address, nodes.Need(e.cpus_per_actor, e.gpus_per_actor, round((e.memory_per_actor_gb or 0.0) * 1e9))
    )
    wanted = result.total if e.actors == "auto" else e.actors
    actors = result.spread(wanted)
    total, blocks = sum(actors.values()), -(-invite // int(e.block_size))
    waiting = f", {wanted - total} wait for nodes to join" if wanted > total else ""
    none = "" if total else ": a run waits twenty minutes for a node that has room, then fails"
    yield f"room for {result.total} actors, {total} come up at once{waiting}{none}"
    for node, room in sorted(result.room.items(), key=lambda item: result.address[item[0]]):
        told = f"{result.address[node]}: room for {room}"
        if node in result.leaving:
            yield f"{told}, which leaves"
        else:
            share = actors[node] / max(1, total)
            yield f"{told}, {actors[node]} actors, about {share * blocks:.3g} blocks, {share * invite:.3g} clients a phase"


def _factored(x: Experiment) -> str:
    """Say which weights can stay factored, and for which operations the others cannot."""
    if (notes := x.found) is None and x.config.executor.inner == "serial":
        return "not tried: executor.inner=serial"
    notes = notes or x.notes
    weights = {path: leaf for path, leaf in T.named_leaves(x.z) if leaf.dim() in (2, 4)}
    able = [path for path, leaf in weights.items() if rules.factors(path, leaf, notes)]
    share = sum(weights[path].numel() for path in able) / T.count(x.z)
    stored = (
        "a client stores what it changed of them, in low rank" if able else "each client has whole weights of its own"
    )
    text = f"{len(able)} of {len(weights)} weight matrices, {share:.0%} of the floats: {stored}"
    if x.config.transforms.up:
        text += ", until transforms.up multiplies out what is sent"
    reasons = sorted({r for path in weights for r in notes.reasons.get(path, ())})
    return f"{text}; the others are stored whole, for what is done to them: {', '.join(reasons)}" if reasons else text


def _disk(use: DiskUse) -> str:
    """Say how much a run folder will take, and for what."""
    parts = {"tables": use.tables, "models": use.models, "checkpoints": use.checkpoints}
    parts |= {f"states of up to {count(use.clients, 'client')}": use.states} if use.states else {}
    told = ", ".join(f"{what} {quantity(of, 'B')}" for what, of in parts.items())
    return f"about {quantity(use.total, 'B')} ({told}), and 1 MB of report"


def _parts(x: Experiment) -> str:
    return ", ".join(f"{part} {T.count(tree):,}" for part, tree in x.z.items())
