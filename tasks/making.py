"""Choice of a task's net: one's own, a transformer or a built-in one, with adapters or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator
from torch import nn

from fedfleet.simulator.named import is_path
from fedfleet.tasks.adapters import Adapted
from fedfleet.tasks.maker import TORCHVISION, Maker, of_path
from fedfleet.tasks.options import AdapterOptions, DataShape
from fedfleet.tasks.pretrained import Norm
from fedfleet.tasks.transformer import HEADS, Use, is_transformer, of_configuration

Make = Maker | Adapted
"""Makes one net, the same for the same seed."""


def _spelt_out(model: str) -> str:
    """Return ``torchvision.models:NAME`` for ``torchvision:NAME``, and anything else as it is."""
    library, _, name = model.partition(":")
    return f"{TORCHVISION}:{name}" if library == "torchvision" and name else model


Model = Annotated[str, AfterValidator(_spelt_out)]
"""What a net is named by."""


def own_model(model: str | None) -> dict[str, str]:
    """Return what code of one's own a model is named by, by key."""
    return {"model": model} if is_path(model) and not is_transformer(model) and model is not None else {}


def maker(
    model: str,
    arguments: Mapping[str, Any] | None,
    adapters: AdapterOptions | None,
    shape: DataShape,
    use: Use,
    built_in: Callable[[int], nn.Module] | None = None,
    norm: Norm = "batch",
) -> Make | None:
    """Return what makes a net by ``module:name`` or ``transformers:PATH``; or by ``built_in``, of a seed, where it has adapters.

    ``norm`` is what BatchNorms of a net by ``module:name`` are replaced by.
    Raises ConfigError.
    """
    if is_transformer(model):
        plain: Maker | None = of_configuration(model, arguments, use, shape)
    elif is_path(model):
        plain = of_path(model, arguments, shape, norm=norm)
    elif adapters is not None and built_in is not None:
        plain = Maker(built_in, f"task.model={model!r}", offered={"shape": tuple(shape.example)})
    else:
        plain = None
    if plain is None or adapters is None:
        return plain
    return Adapted(plain, adapters, heads=HEADS if is_transformer(model) and use == "classify" else ())
