"""Any net with any loss: z = {"x": its parameters}, and "b" where its layers keep count of something.

By configuration, ``task: {name: module, model: "package.module:make_net", loss: mse}``; in Python
``from_module(make_net, loss="mse")``.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, get_args

from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from fedfleet.simulator.ambient import fresh_settings
from fedfleet.simulator.author import BUFFERS, Batch, Key, Objective, Tree
from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.named import found, is_path
from fedfleet.tasks.adapters import Adapted
from fedfleet.tasks.maker import Maker
from fedfleet.tasks.making import Make, Model, maker, own_model
from fedfleet.tasks.measures import alone, mean_loss
from fedfleet.tasks.metrics import MetricOptions, chosen, named_by_path
from fedfleet.tasks.models import checked_leaves, leaves
from fedfleet.tasks.options import AdapterOptions, DataShape, Net, TaskOptions
from fedfleet.tasks.pretrained import Norm
from fedfleet.tasks.stateful import buffers, called, check_parameters, hollow, prepared, trainable
from fedfleet.tasks.targets import LOSSES, Each, Loss, guessed, own_loss
from fedfleet.tasks.torch_losses import from_torch, wrapped
from fedfleet.tasks.transformer import is_transformer

Measure = Callable[[Tensor, Tensor], Any]


class ModuleOptions(TaskOptions):
    """A net of one's own, and what it learns."""

    texts: ClassVar[bool] = True
    model: Model = Field(examples=["nets:make_net"])
    """module:name of what makes the net, a function or a class; torchvision:NAME of one of torchvision's; or transformers:PATH of a
    causal language model of Hugging Face's."""
    arguments: dict[str, Any] | None = None
    """What it is called with; ``seed``, ``shape`` and ``classes`` it is told besides, where it names them. Of a transformer, what
    is other than its configuration says."""
    adapters: AdapterOptions | None = None
    """Leave the net's weights as they are, and learn small matrices beside them (LoRA)."""
    norm: Norm = "batch"
    """What the net normalises by: BatchNorm; GroupNorm in its place, with its scales and shifts; frozen: BatchNorm with the
    statistics that it comes with, in training too."""
    loss: str = "cross_entropy"
    """cross_entropy, token_cross_entropy, bce_with_logits, mse, mae, huber; or module:name of ``(outputs, y) -> (B, ...)``."""
    metrics: list[str | MetricOptions] | None = Field(default=None)
    """accuracy, f1, auc, mse, rmse, mae, r2; torchmetrics:CLASS, sklearn:FUNCTION; or module:name of ``(outputs, y) -> number``; or
    mappings of such a name and ``arguments``. If not given, what goes with the loss."""
    source: str | None = None
    """Digest of the code of model, loss and metrics; a run says here what it was."""

    @model_validator(mode="after")
    def _known(self) -> ModuleOptions:
        if not is_path(self.model) and not is_transformer(self.model):
            raise ValueError(f"model={self.model!r} is no module:name, such as nets:make_net: give one")
        if self.norm != "batch" and is_transformer(self.model):
            raise ValueError(f"norm={self.norm} is not for model={self.model}: leave it out")
        return self

    def net(self) -> Net:
        """Return the net that they name."""
        return Net(self.model, self.adapters, self._paths())

    def _paths(self) -> dict[str, str]:
        named = {
            **own_model(self.model),
            "loss": self.loss,
            **named_by_path(self.metrics),
        }
        return {key: text for key, text in named.items() if is_path(text)}


def of_options(options: ModuleOptions, shape: DataShape) -> ModuleTask:
    """Return the task of a configuration. Raises ConfigError."""
    loss: Any = found("task.loss", options.loss) if is_path(options.loss) else options.loss
    make = maker(options.model, options.arguments, options.adapters, shape, "foretell", norm=options.norm)
    assert make is not None
    return ModuleTask(make, loss, options.metrics, "task.")


@fresh_settings()
def from_module(
    net: nn.Module | Callable[..., nn.Module],
    *,
    loss: str | Each = "cross_entropy",
    metrics: Sequence[str | Measure | Mapping[str, Any]] | Mapping[str, str | Measure] | None = None,
    adapters: AdapterOptions | Mapping[str, Any] | None = None,
    norm: Norm = "batch",
) -> ModuleTask:
    """Return the task of learning a net's parameters.

    Args:
        net: a function or class that makes the net, called with torch's generator at the run's seed (and with ``seed``, if it names
            it), so that runs of several seeds begin from several weights; or a net, from whose own weights all begin.
        loss: cross_entropy, token_cross_entropy, bce_with_logits, mse, mae or huber; or ``(outputs, y) -> (B, ...)``, a loss an
            example.
        metrics: of accuracy, f1, auc, mse, rmse, mae, r2, torchmetrics:CLASS and sklearn:FUNCTION, mappings of such a ``name`` and
            ``arguments``, or functions ``(outputs, y) -> number``, perhaps by name; the best model is kept by the first. If nothing
            is said, those that go with the loss. The mean loss is always measured.
        adapters: options of low-rank adapters, which are learnt in the place of the net's weights.
        norm: what the net's BatchNorms are replaced by: "group" for GroupNorm with their scales and shifts, "frozen" for the
            statistics that they come with, "batch" for nothing.

    Raises ConfigError, in one line, for what is none of these.

    """
    if not callable(net):
        raise ConfigError(f"from_module: net={net!r}: give a torch.nn.Module, or a function or class that makes one")
    if norm not in get_args(Norm):
        raise ConfigError(f"from_module: norm={norm!r}: choose one of {', '.join(get_args(Norm))}")
    name = getattr(net, "__name__", type(net).__name__)
    given: Any = list(metrics.items()) if isinstance(metrics, Mapping) else metrics
    if isinstance(net, nn.Module):
        check_parameters(net)  # a copy has neither hooks nor memory of others
    try:
        kept = copy.deepcopy(net).cpu() if isinstance(net, nn.Module) else net  # whatever becomes of it
    except Exception as e:  # as where it holds what it has computed
        raise ConfigError(
            f"net {name}: it cannot be copied ({one_line(e)[:120]}): give a function that makes it"
        ) from e
    plain = Maker(kept, f"net {name}", "", norm=norm)
    if adapters is None:
        return ModuleTask(plain, loss, given, "")
    try:
        options = adapters if isinstance(adapters, AdapterOptions) else AdapterOptions(**adapters)
    except ValidationError as e:
        fault = e.errors()[0]
        raise ConfigError(
            f"from_module: adapters.{'.'.join(map(str, fault['loc']))}={fault['input']!r}: {fault['msg']}"
        ) from None
    return ModuleTask(Adapted(plain, options, "adapters"), loss, given, "")


class ModuleTask:
    """A net and a loss. Functions: "predict", outputs (B, ...); "per_example", the loss and some metrics (B,)."""

    def __init__(self, make: Make, loss: str | Each, metrics: Iterable[Any] | None, key: str):
        self.make, self.name = make, make.name
        self.loss = _loss(loss, key)
        made = make(0)
        if self.name == "<lambda>":
            self.name = type(made).__name__
        self._net = prepared(made)
        self.parts = ("x", BUFFERS) if buffers(self._net) else ("x",)
        shape = make.offered.get("shape")  # without one, nobody knows which layer comes last
        self.leaves: dict[str, frozenset[str]] = (
            {**leaves(self._net), "head": frozenset()} if shape is None else checked_leaves(self._net, shape)
        )
        hollow(self._net)
        self.chosen = chosen(self.loss.metrics if metrics is None else metrics, self.loss, key)
        of_numbers = self.loss.own is None and self.loss.axis is None and not self.loss.binary
        self.predicted = None if of_numbers else self._predicted
        self.ignored = self.loss.ignored
        self.objectives = {"train": Objective(loss=self._train, sign={"x": 1})}
        self.functions: Mapping[str, Callable[[Tree, Batch], Any]] = {
            "predict": lambda z, batch: self.outputs(z, batch.x),
            "per_example": self._each,
        }

    def init(self, seed: int) -> Tree:
        """Return the net's initial parameters, and what its layers keep count of, by name."""
        net = prepared(self.make(seed))
        z = {"x": {name: p.clone() for name, p in trainable(net).items()}}
        return z | ({BUFFERS: buffers(net)} if BUFFERS in self.parts else {})

    def net(self) -> nn.Module:
        """Return the net as it is made, with torch's own layers."""
        return self.make(0)

    def outputs(self, z: Tree, x: Tensor) -> Tensor:
        """Return the net's outputs (B, ...) for inputs (B, ...), as they are outside training."""
        return called(self._net, z["x"], z.get(BUFFERS, {}), x)[0]

    def _train(self, z: Tree, batch: Batch, ctx: Any, key: Key) -> tuple[Tensor, dict[str, Any]]:
        outputs, new = called(self._net, z["x"], z.get(BUFFERS, {}), batch.x, weight=batch.weight, key=key)
        return self.loss.of_batch(outputs, batch), {BUFFERS: new} if new else {}

    def _each(self, z: Tree, batch: Batch) -> dict[str, Tensor]:
        outputs = self.outputs(z, batch.x)
        kind = guessed(self.loss, outputs, batch.y)
        result = {name: alone(name, kind, outputs, batch.y) for name in self.chosen}
        return {**{k: v for k, v in result.items() if v is not None}, "loss": self.loss.each(outputs, batch.y)}

    def _predicted(self, outputs: Tensor) -> Tensor:
        """Return the class (B,) that outputs of an example each come to, none where they are of several labels."""
        if self.loss.binary:
            return (outputs.flatten() > 0).long()
        return outputs.argmax(1) if outputs.dim() == 2 else outputs.new_empty(0)

    def metrics(self, outputs: Tree, data: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics that were asked for, and the mean loss."""
        kind, result = guessed(self.loss, outputs, data["y"]), {}
        for name, metric in self.chosen.items():
            result[name] = metric(kind, outputs, data["y"])
        return {**result, "loss": mean_loss(self.loss, outputs, data["y"])}


def _loss(loss: Any, key: str) -> Loss:
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ConfigError(
            f"{key}loss={type(loss).__name__}: it has parameters, which no client would learn: make them the net's, or set "
            f"requires_grad=False"
        )
    if not isinstance(loss, str) and callable(loss):
        f: Any = loss
        return from_torch(f) or wrapped(f) or own_loss(f)
    if not isinstance(loss, str) or loss not in LOSSES:
        near = difflib.get_close_matches(str(loss), LOSSES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{key}loss={loss!r}: unknown; {hint}choose one of {', '.join(LOSSES)}, or a function (outputs, y) -> (B, ...)"
        )
    return LOSSES[loss]
