"""Arrays from MATLAB files of version 5 to 7, which hold numbers and no code."""

import signal
import warnings
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfleet.datasets.files import absent, broken

Array = NDArray[Any]


def read_mat(path: Path, names: Sequence[str], source: str) -> list[Array]:
    """Return the variables `names` of a file published at `source`. Raises DataError.

    A file of version 7.3 is another format, HDF5, and refused. Files are read in a process of their own, which a damaged one may
    crash.
    """
    try:
        result = _reader().submit(_load, str(path), list(names)).result()
    except FileNotFoundError:
        raise absent(path, source) from None
    except BrokenExecutor as error:
        _reader.cache_clear()
        raise broken(path, "crashes scipy's reader, as a damaged file may", source) from error
    except NotImplementedError as error:
        raise broken(path, "is of MATLAB 7.3, which is HDF5, expected version 5 to 7", source) from error
    except Exception as error:  # scipy's reader has no error of its own for a damaged file
        raise broken(path, f"cannot be read ({type(error).__name__}: {error})", source) from error
    if missing := [name for name in names if not isinstance(result.get(name), np.ndarray)]:
        raise broken(path, f"has no array {missing[0]!r}", source)
    return [result[name] for name in names]


def _load(path: str, names: list[str]) -> dict[str, Any]:
    """Return variables of a file. Raises MatReadWarning where one is there twice, of which SciPy takes the last."""
    from scipy.io import loadmat  # here, for what else reads data sets needs none
    from scipy.io.matlab import MatReadWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", MatReadWarning)
        return loadmat(path, variable_names=names)


@cache
def _reader() -> ProcessPoolExecutor:
    """Return a process that reads, until this one ends."""
    deaf = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # an interruption is this process's to tell of
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=deaf)


def images(array: Array, order: str, path: Path, source: str) -> Tensor:
    """Return an array of pixels 0..255 as images uint8 (n, c, h, w).

    `order` names its axes, such as "hwcn"; one that has no "c" is grey. Fractions are cut off. Raises DataError.
    """
    if array.dtype.kind not in "uif" or array.ndim != len(order) or 0 in array.shape:
        raise broken(path, f"has images {array.shape} of {array.dtype}, expected numbers ({', '.join(order)})", source)
    if not (array.min() >= 0 and array.max() <= 255):  # which refuses NaN, too
        raise broken(path, f"has pixels {array.min():g}..{array.max():g}, expected 0..255", source)
    result = torch.from_numpy(array.astype(np.uint8))
    return result.permute([order.index(axis) for axis in "nchw" if axis in order]).unflatten(
        0, (-1, 1) if "c" not in order else (-1,)
    )


def labels(array: Array, count: int, path: Path, source: str) -> Tensor:
    """Return labels int64 (count,) 0..9 from a column of digits, of which 10 is 0, or from rows with a 1 in one of ten places.

    Raises DataError.
    """
    one_hot = array.shape == (count, 10) and count * 10 == array.size
    if array.dtype.kind not in "uif" or not (one_hot or array.size == count):
        raise broken(path, f"has labels {array.shape} of {array.dtype}, the {count} images need ({count}, 1)", source)
    if one_hot:
        if not np.isin(array, (0, 1)).all() or (array.sum(1) != 1).any():
            raise broken(path, "has labels that are not one of ten", source)
        return torch.from_numpy(array.argmax(1))
    result = array.reshape(-1)
    if not np.isin(result, range(11)).all():
        raise broken(path, f"has labels {result.min():g}..{result.max():g}, expected 0..10", source)
    return torch.from_numpy(result.astype(np.int64) % 10)
