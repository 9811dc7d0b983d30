"""Weights in a file, safetensors or what ``torch.save`` has written of tensors alone; nothing in it is ever run."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfleet.files import tensors as files
from fedfleet.files.writing import check_regular
from fedfleet.simulator.errors import ConfigError, one_line

MARK, OURS = "vocabulary", "fedfleet"
WEIGHTS, ADAPTERS = "model.safetensors", "adapter_config.json"
PICKLED = (".pt", ".pth", ".bin")


def read_weights(path: str | Path, said: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name. Raises ConfigError, which begins with what is ``said``."""
    path = file_of(path)
    if path.suffix not in PICKLED:
        try:
            return files.read(path)
        except files.UNREADABLE as e:
            raise ConfigError(
                f"{said}: not a readable safetensors file ({one_line(e)}): give a model.safetensors of an earlier run, or a "
                f"state_dict in safetensors or .pt"
            ) from None
    try:
        check_regular(path.stat())
        result = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as e:
        raise ConfigError(f"{said}: cannot be read ({one_line(e)}): give a state_dict in safetensors or .pt") from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as e:
        raise ConfigError(
            f"{said}: no file of weights alone ({one_line(e)[:120]}): write it with torch.save(net.state_dict(), …)"
        ) from None
    result = result.get("state_dict", result) if isinstance(result, Mapping) else result
    if not isinstance(result, Mapping) or not all(isinstance(v, Tensor) for v in result.values()):
        raise ConfigError(f"{said}: it holds no state_dict: write it with torch.save(net.state_dict(), …)")
    return {str(name): leaf for name, leaf in result.items()}


def file_of(path: str | Path) -> Path:
    """Return the file of weights that a path means: of the folder of a run its last model's."""
    path = Path(path)
    try:
        of_run = (path / WEIGHTS).is_file() and not (path / ADAPTERS).exists()
    except OSError:  # a name too long is that of no folder
        return path
    return path / WEIGHTS if of_run else path


def marks(vocabulary: Any) -> dict[str, str]:
    """Return what a file of weights says about them: the digest of the vocabulary by which they read texts, if any."""
    return {} if vocabulary is None else {MARK: vocabulary.digest}


def marked(
    tensors: Mapping[str, Tensor], versions: Mapping[str, Any], about: Mapping[str, str]
) -> Mapping[str, Tensor]:
    """Return a ``state_dict`` that says of itself, where torch has the ``versions`` of its modules, what it is ``about``.

    ``load_state_dict`` looks there for what its own modules are called, and passes over the rest.
    """
    result = OrderedDict(tensors)
    result._metadata = OrderedDict({**versions, **({OURS: dict(about)} if about else {})})  # type: ignore[attr-defined]
    return result


def vocabulary_of(path: str | Path) -> str | None:
    """Return the digest of the vocabulary by which the weights in a file read texts, where the file says one."""
    path = file_of(path)
    try:
        if path.suffix in PICKLED:
            check_regular(path.stat())
            said = getattr(torch.load(path, map_location="cpu", weights_only=True, mmap=True), "_metadata", {})
        else:
            said = {OURS: files.about(path)}
    except (*files.UNREADABLE, pickle.UnpicklingError, RuntimeError, EOFError):
        return None  # read_weights says what is wrong with it
    ours = said.get(OURS) if isinstance(said, Mapping) else None
    mark = ours.get(MARK) if isinstance(ours, Mapping) else None
    return mark if isinstance(mark, str) else None
