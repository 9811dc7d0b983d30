"""Weights in a file, safetensors or what ``torch.save`` has written of tensors alone; nothing in it is ever run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedfleet.simulator.errors import ConfigError, one_line

PICKLED = (".pt", ".pth", ".bin")


def read_weights(path: str | Path, said: str) -> dict[str, Tensor]:
    """Return the tensors of a file by name. Raises ConfigError, which begins with what is ``said``."""
    path = Path(path)
    try:
        if path.suffix not in PICKLED:
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as e:
        raise ConfigError(
            f"{said}: not a readable safetensors file ({one_line(e)}): give a model.safetensors of an earlier run, or a "
            f"state_dict in safetensors or .pt"
        ) from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as e:
        raise ConfigError(
            f"{said}: no file of weights alone ({one_line(e)[:120]}): write it with torch.save(net.state_dict(), …)"
        ) from None
    found = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ConfigError(f"{said}: it holds no state_dict: write it with torch.save(net.state_dict(), …)")
    return {str(name): leaf for name, leaf in found.items()}
