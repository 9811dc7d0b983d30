"""A net as an ONNX file, by torch's exporter, and a comparison of what the file gives with what the net gives."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedfleet.files.writing import whole
from fedfleet.simulator.errors import ConfigError, FedfleetError, one_line
from fedfleet.simulator.signals import imported
from fedfleet.tasks.models import Net
from fedfleet.tasks.pooling import MaxPool2

NEEDED = ("onnx", "onnxscript", "onnxruntime")
ROWS, FEWER = 4, 3
"""Examples of the trace, and of the comparison, which has another number of them."""
TOLERANCE = 1e-4  # of the largest output


def export(net: nn.Module, inputs: Sequence[Tensor], path: Path, names: Sequence[str] = ("x",)) -> Path:
    """Write a net in eval mode as ONNX, for any number of examples, and compare the file's outputs with the net's.

    Args:
        net: takes the inputs and returns one tensor.
        inputs: ``ROWS`` examples each, which it is traced on.
        path: ends in .onnx; a file that is there is replaced.
        names: of the inputs in the file.

    Raises ConfigError for another name, and where a package is not installed; FedfleetError where the net cannot be exported, the
    outputs differ by more than ``TOLERANCE`` of the largest, or the file cannot be written. No file is left then.

    """
    if path.suffix != ".onnx":
        raise ConfigError(f"{path}: its name does not say the format: end it in .onnx")
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{path}: {lacking[0]} is not installed: pip install 'fedfleet[onnx]'")
    rows = torch.export.Dim("n", min=1)
    shapes = tuple({0: rows} for _ in inputs)
    try:
        with whole(path) as scratch:
            _trace(net, tuple(inputs), scratch, list(names), shapes)
            differ = _difference(net, [each[:FEWER] for each in inputs], scratch, names)
            if differ > TOLERANCE:
                raise FedfleetError(
                    f"{path}: its outputs differ from the net's by {differ:.2g} of the largest: no file is written"
                )
    except OSError as e:
        raise FedfleetError(
            f"{path}: cannot be written ({one_line(e)}): give a file in a folder you may write to"
        ) from None
    return path


def _trace(net: nn.Module, inputs: tuple[Tensor, ...], to: Path, names: list[str], shapes: Any) -> None:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net,
                inputs,
                to,
                input_names=names,
                output_names=["outputs"],
                dynamic_shapes=shapes,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as e:
        raise FedfleetError(f"{to.name}: torch cannot export this net ({type(e).__name__}: {one_line(e)})") from e
    finally:
        logger.setLevel(level)


def _difference(net: nn.Module, inputs: Sequence[Tensor], file: Path, names: Sequence[str]) -> float:
    """Return the largest difference between the outputs of a file and of the net, as a part of the largest output."""
    runtime = imported("onnxruntime")
    given = {name: each.numpy() for name, each in zip(names, inputs, strict=True)}
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, given)
    with torch.no_grad():
        expected = net(*inputs).numpy()
    if found.shape != expected.shape:
        return float("inf")
    return float(np.abs(found - expected).max() / max(1e-12, np.abs(expected).max()))


def code(net: nn.Module) -> str | None:
    """Return one of torch's own layers, or several one after another, as an expression, "nn.Linear(...)"; else None."""
    if _of_torch(net):
        return f"nn.{net!r}"
    if not isinstance(net, nn.Sequential) or type(net).forward not in (nn.Sequential.forward, Net.forward):
        return None
    layers = []
    for name, layer in net.named_children():
        if isinstance(layer, MaxPool2):
            layers.append("nn.MaxPool2d(2)")
        elif _of_torch(layer):
            layers.append(f"nn.{layer!r}")
        else:
            return None
        if name != str(len(layers) - 1):
            return None
    return f"nn.Sequential({', '.join(layers)})"


def _of_torch(layer: nn.Module) -> bool:
    """Whether this is a layer of torch's with no others in it."""
    return type(layer).__module__.startswith("torch.nn.modules.") and not [*layer.children()]
