"""Gradient inversion of what a client sends: rebuild its examples from what the server has of it, and say how alike they are.

What is set out from is in ``experiments/inversion.py``, how it is looked in ``experiments/rebuilding.py``.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file
from torch import Tensor

from fedfleet.assembly.prepared import Prepared
from fedfleet.config.schema import load
from fedfleet.experiments import campaign
from fedfleet.experiments.checkpoint import STATES, Checkpoint, Damaged
from fedfleet.experiments.checkpoint import load as read_checkpoint
from fedfleet.experiments.resume import changed
from fedfleet.experiments.runfolder import CHECKPOINTS, claim
from fedfleet.files.writing import check_regular, whole, write_text
from fedfleet.inversion.attack import Attacked, attacked, check
from fedfleet.inversion.rebuilding import (
    WINDOW,
    Found,
    How,
    closed_form,
    cosine,
    euclidean,
    guess,
    inferred,
    matched,
    psnr,
    rebuilt,
    squared_errors,
    ssim,
)
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.driver.simulate import Position, play, start
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.executors.local import LocalExecutor

PLAIN_EVERY_S = 5.0
ITERATIONS = {"cosine": 1000, "dlg": 60}
FEW = 20  # examples that have a row of the table


class Asked(NamedTuple):
    """What is asked for: the client, None for the first that is heard; the round, None for the next one; how it is looked."""

    client: int | None
    round: int | None
    most: int
    labels: Literal["known", "inferred"]
    how: How


class Rebuilt(NamedTuple):
    """What was set out from; labels (n,) that were taken and examples found, in the order of the originals; all numbers."""

    attacked: Attacked
    y: Tensor
    found: Tensor
    numbers: dict[str, Any]
    seconds: float


def search(method: Any, iterations: int | None, tv: float, restarts: int | None) -> How:
    """Return how is looked, of what was given. Raises ConfigError for options that the method does not take."""
    if method == "closed":
        for name, value in (("iterations", iterations), ("restarts", restarts)):
            if value is not None:
                raise ConfigError(f"--{name} {value}: method closed does not search: leave it out")
        return How(method, 0, tv, 0)
    return How(method, iterations or ITERATIONS[method], tv, restarts or 1)


def invert(
    source: Path, overrides: list[str] | None, asked: Asked, tell: Callable[[str], None], *, trust: bool = False
) -> Rebuilt:
    """Attack the run of a configuration, a YAML file, or a run in a folder. Raises ConfigError, and what its rounds do."""
    with tempfile.TemporaryDirectory() as scratch, closing(LocalExecutor()) as executor:
        x, at = _position(source, overrides, asked.round, Path(scratch), trust)
        executor.threads = x.config.executor.threads_per_actor
        executor.start(x.setup())
        conditions = x.conditions()
        wanted = at.index if asked.round is None else asked.round
        while at.index < wanted:
            tell(f"playing round {at.index}, up to round {wanted}")
            at.accept(play(x.algorithm, at, x.problem, conditions, executor))
        return attack(x, attacked(x, at, asked.client, asked.most), asked, at.index, tell)


def _position(
    source: Path, overrides: list[str] | None, wanted: int | None, scratch: Path, trust: bool
) -> tuple[Prepared, Position]:
    """Return an experiment, and the nearest of its positions at hand that is not after the round wanted."""
    if not source.is_dir():
        x = _checked(campaign.only(load(source, overrides, trust=trust), "invert"))
        if wanted is not None and wanted >= x.config.rounds:
            raise ConfigError(f"--round {wanted}: the run has rounds 0 to {x.config.rounds - 1}: choose one of them")
        return x, start(x.algorithm, x.z, x.problem, x.conditions())
    config, result = changed(source / "config.yaml", overrides, trust=trust), _checkpoint(source, wanted)
    last = max(config.rounds, result.rounds if result else 0)
    if wanted is not None and wanted > last:
        raise ConfigError(
            f"--round {wanted}: the run has rounds 0 to {last - 1}, and {last} would be the next: choose one"
        )
    x = _checked(Prepared(config if result is None else config.model_copy(update={"warm_start": None})))
    if result is None:
        return x, start(x.algorithm, x.z, x.problem, x.conditions())
    if result.account["data"] != x.fingerprint:
        raise ConfigError(f"{source}: its clients or test data were others: give the data of the run")
    states = scratch / STATES  # a copy: rounds that are played write there
    if (kept := source / CHECKPOINTS / STATES).exists():
        try:
            check_regular(kept.stat())
            shutil.copyfile(kept, states)
        except OSError as e:
            raise ConfigError(f"{kept}: cannot be read ({one_line(e)}): bring back the file of the run") from None
    at = start(x.algorithm, x.z, x.problem, x.conditions(), states)
    at.memory.restore(result.remembered)
    at.index, at.clock_s, at.state = result.rounds, result.clock_s, result.state
    return x, at


def _checked(x: Prepared) -> Prepared:
    check(x)
    return x


def _checkpoint(folder: Path, wanted: int | None) -> Checkpoint | None:
    """Return the last checkpoint of a run that is whole and not after a round; None where the run has to begin anew."""
    for path in sorted((folder / CHECKPOINTS).glob("round-*.safetensors"), reverse=True):
        try:
            result = read_checkpoint(path)
        except Damaged:
            continue
        if wanted is None or result.rounds <= wanted:
            return result
    return None


def attack(x: Prepared, at: Attacked, asked: Asked, index: int, tell: Callable[[str], None]) -> Rebuilt:
    """Rebuild the examples, and compare them. Raises ConfigError for what the method is not for."""
    how, shape, key = asked.how, tuple(at.x.shape), rng.fold(rng.key(x.config.seed), "inversion")
    images = len(shape) == 4
    if how.tv and (not images or how.method != "cosine"):
        why = f"method {how.method}" if images else "examples that are no images"
        raise ConfigError(f"--tv {how.tv:g}: total variation is not for {why}: leave it out")
    if how.method == "closed" and (at.parts.first is None or len(at.x) > 1):
        raise ConfigError(
            f"--method closed: it takes one example, a first layer that is linear with a bias, and all of it sent; here "
            f"{len(at.x)} examples are looked for: choose cosine"
        )
    tell(f"round {index}, client {at.client}: {at.seen}; {len(at.x)} examples, {len(at.observed):,} numbers")
    y = at.y if asked.labels == "known" else _labels(at, guess(shape, *at.box, rng.fold(key, "labels"), at.x.dtype))
    started = time.monotonic()
    if how.method == "closed":
        assert at.parts.first is not None
        weight, bias = (at.observed[part] for part in at.parts.first)
        x0 = closed_form(weight.view(len(bias), -1), bias).view(shape).clamp(*at.box)
        result = Found(x0, float(cosine(at.simulate(x0, y), at.observed)))
    else:
        with _shown(how, tell) as show:
            result = rebuilt(at.simulate, at.observed, shape, y, at.box, how, key, show)
    seconds = time.monotonic() - started
    order = matched(at.x, result.x)
    numbers = _numbers(x, at, asked, index, y, result, order)
    return Rebuilt(at, y[order], result.x[order], numbers, seconds)


def _labels(at: Attacked, noise: Tensor) -> Tensor:
    """Return the labels (n,) that the biases of the last layer tell. Raises ConfigError where there are none to look at."""
    if at.parts.head is None:
        raise ConfigError(
            "--labels inferred: they are told by the biases of a last layer that is linear, which this task has not, or does not "
            "send whole: give --labels known"
        )
    classes = at.parts.head.stop - at.parts.head.start
    each = [at.simulate(noise, torch.full_like(at.y, label))[at.parts.head].detach() for label in range(classes)]
    return inferred(at.observed[at.parts.head], torch.stack(each), len(at.y))


def _numbers(
    x: Prepared, at: Attacked, asked: Asked, index: int, y: Tensor, result: Found, order: Tensor
) -> dict[str, Any]:
    """Return all that is to be told, as plain data."""
    width = at.box[1] - at.box[0]
    rows = _likeness(at.x, result.x[order], width)
    blind = _likeness(at.x, at.blind, width)
    mine = (at.owner == at.client).tolist()
    classes = 1 + max(int(at.y.max()), int(y.max()))
    right = int(y.bincount(minlength=classes).minimum(at.y.bincount(minlength=classes)).sum())
    examples = [
        {"client": c, "label": a, "taken_label": b, **{k: v[i] for k, v in rows.items()}}
        for i, (c, a, b) in enumerate(zip(at.owner.tolist(), at.y.tolist(), y[order].tolist(), strict=True))
    ]
    again = at.simulate(result.x, y).detach()
    return {
        "client": at.client,
        "round": index,
        "seed": x.config.seed,
        "seen": at.seen,
        "clients_in_what_is_seen": len(at.clients),
        "numbers": len(at.observed),
        "method": asked.how.method,
        "iterations": asked.how.iterations,
        "restarts": asked.how.restarts,
        "tv": asked.how.tv,
        "labels": asked.labels,
        "labels_right": right,
        "cosine_distance": float(cosine(again, at.observed)),
        "squared_distance": float(euclidean(again, at.observed)),
        "range": list(at.box),
        "mean": _means(rows, mine),
        "mean_of_all_in_the_sum": _means(rows, [True] * len(mine)),
        "mean_of_blind_guess": _means(blind, mine),
        "examples": examples,
    }


def _likeness(originals: Tensor, others: Tensor, width: float) -> dict[str, list[float]]:
    errors = squared_errors(originals, others)
    result = {"mse": errors / width**2, "psnr": psnr(errors, width)}
    if originals.dim() == 4 and min(originals.shape[2:]) >= WINDOW:
        result["ssim"] = ssim(originals, others, width)
    return {k: v.tolist() for k, v in result.items()}


def _means(rows: dict[str, list[float]], which: Sequence[bool]) -> dict[str, float]:
    picked = {k: [v for v, w in zip(values, which, strict=True) if w] for k, values in rows.items()}
    return {k: math.fsum(v) / len(v) for k, v in picked.items()}


@contextmanager
def _shown(how: How, tell: Callable[[str], None]) -> Iterator[Callable[[int, int, float], None]]:
    """Show how the search goes: a live line on a terminal, else a line every few seconds."""
    console, last = Console(stderr=True), time.monotonic()
    live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def show(restart: int, i: int, distance: float) -> None:
        nonlocal last
        line = f"restart {restart + 1}/{how.restarts}, iteration {i + 1}/{how.iterations}: distance {distance:.3g}"
        if live is not None:
            live.update(Text(line))
        elif time.monotonic() - last > PLAIN_EVERY_S:
            last = time.monotonic()
            tell(line)

    if live is not None:
        live.start()
    try:
        yield show
    finally:
        if live is not None:
            live.stop()


def tables(done: Rebuilt) -> Iterator[Table]:
    """Yield the tables: what was found all in all, and of each of the client's examples."""
    n = done.numbers
    table = Table(title=f"client {n['client']}, round {n['round']}", show_header=False)
    summed = n["clients_in_what_is_seen"] > 1
    labels = f"{n['labels']}, {n['labels_right']} of {len(n['examples'])} right"
    often = f", {n['iterations']} iterations" + (f", {n['restarts']} times" if n["restarts"] > 1 else "")
    rows = {"seen": n["seen"], "method": n["method"] + (often if n["iterations"] else "")}
    rows |= {"labels": labels, "distance, by angle": f"{n['cosine_distance']:.3g}", "rebuilt": _told(n["mean"])}
    rows |= {"all in the sum": _told(n["mean_of_all_in_the_sum"])} if summed else {}
    rows |= {"mean image of the label": _told(n["mean_of_blind_guess"]), "seconds": f"{done.seconds:,.1f}"}
    for key, value in rows.items():
        table.add_row(key, value)
    yield table
    table = Table(title="Examples")
    mine = [e for e in n["examples"] if e["client"] == n["client"]]
    for name in ("label", "taken for", *(k for k in ("mse", "psnr", "ssim") if k in mine[0])):
        table.add_column(name, justify="right")
    for e in mine[:FEW]:
        table.add_row(
            str(e["label"]), str(e["taken_label"]), *(f"{e[k]:.4g}" for k in ("mse", "psnr", "ssim") if k in e)
        )
    if len(mine) > FEW:
        table.caption = f"and {len(mine) - FEW} more"
    yield table


def _told(mean: dict[str, float]) -> str:
    similar = f", SSIM {mean['ssim']:.3f}" if "ssim" in mean else ""
    return f"PSNR {mean['psnr']:.1f} dB, MSE {mean['mse']:.3g}{similar}"


def write(done: Rebuilt, out: Path) -> None:
    """Write the numbers, the examples and a picture to a new folder. Raises ConfigError where it is taken."""
    from fedfleet.inversion.figure import draw  # matplotlib takes most of a second to import

    at = done.attacked
    drawn = draw(at.x, done.found, done.numbers)
    claim(out)
    with whole(out / "inversion.safetensors") as scratch:
        tensors = {"originals": at.x, "rebuilt": done.found, "labels": at.y, "taken_labels": done.y, "owner": at.owner}
        save_file({k: v.contiguous().clone() for k, v in {**tensors, "seen": at.observed}.items()}, scratch)
    with whole(out / "inversion.png") as scratch:
        scratch.write_bytes(drawn)
    write_text(out / "inversion.json", json.dumps(done.numbers, indent=2) + "\n")


def run(
    source: Path,
    overrides: list[str] | None,
    asked: Asked,
    out: Path,
    console: Console,
    tell: Callable[[str], None],
    *,
    trust: bool = False,
) -> None:
    """Attack, show the tables and write the folder. Raises what ``invert`` and ``write`` do, and FedfleetError on a full disk."""
    done = invert(source, overrides, asked, tell, trust=trust)
    for table in tables(done):
        console.print(table)
    try:
        write(done, out)
    except OSError as e:
        raise FedfleetError(f"{out}: cannot be written ({one_line(e)}): give another folder") from None
