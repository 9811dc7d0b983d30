"""The model card of a run: what was learnt, how, of whose data, what it is worth and how to load it, as hubs of models show it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fedfleet.files.documents import dump
from fedfleet.files.writing import write_text
from fedfleet.report import own_loss
from fedfleet.report.overview import headline, of_run
from fedfleet.report.settings import settings
from fedfleet.report.sheet import Grid
from fedfleet.report.tables import Run, mapping
from fedfleet.report.words import joined, number

CARD = "model_card.md"
WEIGHTS = "model.safetensors"
NETS = ("classification", "module", "language_model")
"""Tasks of a single net, which a run gives back."""
USE = """```python
import fedfleet

net = fedfleet.open_run(".").model()  # a torch.nn.Module in eval mode; "best" for the best round's
```"""
USE_TEXT = """```python
import fedfleet

run = fedfleet.open_run(".")
net = run.model()  # a torch.nn.Module in eval mode; "best" for the best round's
tokens, mask = run.encode(["a new text"])  # by vocabulary.json
```"""
NAMED = 100  # classes or features
TENSORS = """```python
from safetensors.torch import load_file

weights = load_file("{weights}")  # names begin with the model's part, such as x.
```"""
AGAIN = (
    "`config.yaml` with `environment.json` is all that it followed from, and `fedfleet run config.yaml` makes it again."
)


PLAIN = """In plain torch, without fedfleet: the optimiser and the loss of the clients, without what the algorithm adds to them
or does between rounds.

```python
import torch
from safetensors.torch import load_file
from torch import nn
{of}
net = {net}
net.load_state_dict({{name[2:]: leaf for name, leaf in load_file("{weights}").items()}}{strict})
optimizer = {optimizer}
for x, y in loader:  # {yours}yours: x (n, {shape}), y {labels}
    optimizer.zero_grad()
    {loss}.backward(){clipped}
    optimizer.step()
```"""


OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
"""Torch's names of the clients' optimisers."""
EPS = {"Adam": 1e-8, "AdamW": 1e-8, "Adagrad": 1e-10}
"""Torch's defaults."""
Net = tuple[str, str]
"""A net in Python: a line that says where it is from, empty for torch, and an expression."""


def write(run: Run, net: Net | None = None, rate: float = 1.0) -> None:
    """Write the card of a run that has a model into its folder; ``net`` and ``rate`` as of ``card``."""
    if (run.path / WEIGHTS).is_file():
        write_text(run.path / CARD, card(run, net, rate))


def card(run: Run, net: Net | None = None, rate: float = 1.0) -> str:
    """Return the card as Markdown, after a head in YAML that hubs read.

    ``net`` is the run's net in Python, if there is code for it; ``rate`` the share of its learning rate left in its last round.
    """
    parts = [
        f"---\n{dump(_head(run), allow_unicode=True)}---",
        f"# {_name(run)}",
        *of_run(run),
        "## Measured",
        _measured(run),
        "## How it was trained",
        _markdown(settings({run.label: [run]})),
        "## Use",
        *_use(run),
        _plain(run, net, rate),
        "## What is not promised",
        " ".join(_not_promised(run)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _use(run: Run) -> Iterator[str]:
    own = run.summary.get("own") or {}
    whole = run.get("task", "name") in NETS and "task" not in own
    examples = run.summary.get("examples") or {}
    use = (USE_TEXT if "vocabulary" in examples else USE) if whole else TENSORS
    yield use.format(weights=WEIGHTS)
    for what, key in (
        ("Classes, in the order of the outputs", "class_names"),
        ("Features, in their order", "features"),
    ):
        if names := examples.get(key):
            more = f" and {len(names) - NAMED:,} more" * (len(names) > NAMED)
            yield f"{what}: {', '.join(names[:NAMED])}{more}."
    if examples.get("pixels"):
        yield "The net reads pixels of -1 to 1: `x / 127.5 - 1` of bytes."
    if not own:
        yield AGAIN


def _plain(run: Run, net: Net | None, rate: float) -> str:
    """Say how one goes on with the model in plain torch, where there is code that makes its net."""
    shape = (run.summary.get("examples") or {}).get("shape")
    if net is None or shape is None:
        return ""
    own = own_loss.read(run)
    classes = run.get("task", "name") == "classification"
    loss = "nn.functional.cross_entropy(net(x), y)" if classes else "loss(net(x), y)" if own is None else own.code()
    theirs = ["loader"] if classes else ["loss", "loader"] if own is None else ["loader", *own.tensors]
    told = {
        "yours": f"{joined(theirs)} {'is' if len(theirs) == 1 else 'are'} ",
        "optimizer": _optimizer(run, rate),
        "shape": ", ".join(map(str, shape)),
        "labels": "(n,)" if classes or (own is not None and own.of_indices and not own.of_tokens) else "(n, ...)",
        "loss": loss,
        "clipped": _clipped(run),
    }
    of, made = net
    seed = "\ntorch.manual_seed(0)  # for what the net draws and does not learn, which the file has not"
    strict = ", strict=False" if of else ""
    return PLAIN.format(of=f"{of}\n{seed}" if of else "", net=made, strict=strict, weights=WEIGHTS, **told)


def _rule(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the algorithm that has a learning rate, and those of its clients' optimiser."""
    options = mapping(run.config.get("algorithm"))
    while "lr" not in options and "of" in options:
        options = mapping(options["of"])
    return options, mapping(options.get("client_optimizer", options.get("optimizer")))


def _clipped(run: Run) -> str:
    most = _rule(run)[1].get("clip_norm")
    return f"\n    nn.utils.clip_grad_norm_(net.parameters(), {most})" if isinstance(most, int | float) else ""


def _optimizer(run: Run, rate: float) -> str:
    """Return the clients' optimiser in torch's words, at the rate of the last round."""
    options, how = _rule(run)
    name = OPTIMIZERS.get(str(how.get("name")), "SGD")
    # A received file may have other things there, which are no code to print.
    numbers = {key: value for key, value in how.items() if isinstance(value, int | float)}
    lr = options.get("lr")
    first = lr if isinstance(lr, int | float) else 0.1
    given: dict[str, Any] = {"lr": first if rate == 1.0 else float(f"{first * rate:.6g}")}
    if name in ("Adam", "AdamW") and {"beta1", "beta2"} <= numbers.keys():
        given["betas"] = (numbers["beta1"], numbers["beta2"])
    if numbers.get("eps", EPS.get(name)) != EPS.get(name) and name in EPS:
        given["eps"] = numbers["eps"]
    given |= {key: numbers[key] for key in ("momentum", "nesterov", "weight_decay") if numbers.get(key)}
    if name == "AdamW":
        given["weight_decay"] = numbers.get("weight_decay", 0.01)
    said = ", ".join(f"{key}={value}" for key, value in given.items())
    fell = f"  # lr of the last round; it was {first} in the first"
    return f"torch.optim.{name}(net.parameters(), {said}){fell * (rate != 1.0)}"


def _name(run: Run) -> str:
    algorithm, data = run.get("algorithm", "name") or run.label, run.get("population", "dataset")
    return f"{algorithm} on {data}" if data else str(algorithm)


def _head(run: Run) -> dict[str, Any]:
    """What hubs of models look for: tags, and the final metrics of the test examples."""
    algorithm, data, task = run.get("algorithm", "name"), run.get("population", "dataset"), run.get("task", "name")
    known = ((metric, run.final(metric)) for metric in headline([run]))
    metrics = [{"type": m, "name": m, "value": v} for m, v in known if v is not None and math.isfinite(v)]
    tags = list(dict.fromkeys(str(tag) for tag in ("federated-learning", algorithm, task) if tag))
    result = {
        "task": {"type": str(task or "other")},
        "dataset": {"type": str(data or "other"), "name": str(data or "other")},
        "metrics": metrics,
    }
    index = [{"name": _name(run), "results": [result]}] if metrics else []
    return {"library_name": "fedfleet", "tags": tags} | ({"model-index": index} if index else {})


def _measured(run: Run) -> str:
    """A table of the metrics, each of the first, the last and the best model."""
    rows = [
        [metric, *(number(run.summarised(key, f"eval/{metric}")) for key in ("initial", "final", "best"))]
        for metric in headline([run])
    ]
    return _markdown(Grid(["metric", "initial", "final", "best"], rows, "")) if rows else "Nothing was."


def _markdown(grid: Grid | None) -> str:
    if grid is None:
        return ""
    rows = [grid.head, ["---"] * len(grid.head), *grid.rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in row)} |" for row in rows)


def _not_promised(run: Run) -> Iterator[str]:
    whose = (
        "clients' data were dealt, or drawn, on one machine"
        if run.summary.get("dealt", True)
        else "all data lay together"
    )
    yield f"Devices, networks and their failures were simulated; {whose}."
    if not (run.summary.get("privacy") or run.summary.get("example_privacy")):
        yield "Nothing hides what clients' data were: the model may tell of them."
    if run.seed is not None:
        yield f"It is one run, of seed {run.seed}: another seed gives another model."
    if run.summary.get("bit_exact") is False:
        yield "It cannot be made again to the bit; `events.jsonl` says why."
    if run.summary.get("own"):
        yield "A part of it was made in Python: its source is on record by a digest, and not in this folder."
