"""Arrays that take seconds to make, kept in the user's cache as safetensors until what they are made of changes.

They lie in `made/` of the cache, not in the data directory, which holds files as published, and often may not be written to.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from torch import Tensor

from fedfleet.datasets.files import absent, broken, cache_dir, whole
from fedfleet.files import tensors

Arrays = Mapping[str, Tensor]


def kept(name: str, of: Mapping[str, str], make: Callable[[], Arrays]) -> Arrays:
    """Return what `make` gives, from the cache if it is there already.

    `of` says all that decides the arrays: digests of code and of files, versions of packages. Its digest is part of the file's
    name, so that what was made otherwise is never taken. What is damaged, or cannot be kept, is made again.
    """
    digest = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / "made" / f"{name}-{digest}.safetensors"
    with suppress(*tensors.UNREADABLE):
        return tensors.read(path)
    print(f"fedfleet: making {name}, once, to keep it as {path}", file=sys.stderr)
    arrays = make()
    with suppress(*tensors.UNREADABLE), whole(path) as file:
        file.write(tensors.dumped(arrays))
    return arrays


def digest_of(path: Path, source: str) -> str:
    """Return the SHA-256 of a file published at `source`. Raises DataError where it is absent or cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise absent(path, source) from None
    except OSError as error:
        raise broken(path, f"cannot be read ({error})", source) from error


def code(modules: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the sources of modules that are imported: a recipe that has changed is another recipe."""
    files = {module: Path(sys.modules[module].__file__ or "") for module in modules}
    return {module: hashlib.sha256(file.read_bytes()).hexdigest() for module, file in files.items()}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages whose files or arithmetic go into what is made."""
    return {package: version(package) for package in packages}
