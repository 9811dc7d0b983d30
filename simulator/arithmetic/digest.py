"""Digests, which tell two sets of tensors apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a text and of named tensors: their names, types, shapes and elements."""
    result = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        result.update(_bytes(tensor))
    return result.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in order, whatever its strides."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().data
