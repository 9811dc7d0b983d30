"""The data directory: where the original files lie, how a missing one is fetched and how an IDX file is read.

Below the directory every file keeps the name it was published under: `mnist/`, `fashion-mnist/` and `emnist/` hold IDX
files, `cifar-10-batches-bin/` and `cifar-100-binary/` the binary versions. Nothing here is ever unpickled.

IDX (https://web.archive.org/web/2020/http://yann.lecun.com/exdb/mnist/): two zero bytes, the element type (8: uint8),
the number of dimensions, every dimension as a big-endian uint32, then the elements in row-major order.
"""

import gzip
import hashlib
import http.client
import math
import os
import shutil
import struct
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fedfleet.simulator.errors import one_line, printable

ENVIRONMENT = "FEDFLEET_DATA"
# Seconds a server may stay silent, for every address of its name: without a network a run must fail soon.
TIMEOUT = 5.0


class DataError(ValueError):
    """A data file or data set that cannot be used; one line that names it, what is wrong and the mend."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def data_dir(override: str | None = None) -> Path:
    """Return the data directory: `override`, else $FEDFLEET_DATA, else `fedfleet` in the user's cache.

    The directory need not exist; a download makes it.
    """
    if chosen := override or os.environ.get(ENVIRONMENT):
        return Path(chosen).expanduser()
    return cache_dir()


def cache_dir() -> Path:
    """Return `fedfleet` in the user's cache, for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedfleet"


def broken(path: Path, problem: str, source: str) -> DataError:
    """Return the error for a file that is not what was published at `source` (a URL or a publisher's name)."""
    fix = f"delete it and let it download again, or copy the original file from {source}"
    return DataError(f"{path}: {one_line(problem)}; {fix}")


def absent(path: Path, source: str) -> DataError:
    """Return the error for a file that nobody fetches but its user, published at `source` (a URL or a publisher's name)."""
    return DataError(f"{path} is not there: fetch it from {source}, or set {ENVIRONMENT} to the folder that has it")


def entries(folder: Path) -> list[Path]:
    """Return what lies in a folder, by name, without what systems put there: hidden files, as macOS' ``._x``, and ``__MACOSX``.

    Nothing lies in one that is not there.
    """
    if not folder.is_dir():
        return []
    return sorted(at for at in folder.iterdir() if not at.name.startswith(".") and at.name != "__MACOSX")


def ending(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the `entries` whose names end in one of the suffixes, in capitals or not."""
    return [at for at in entries(folder) if at.name.lower().endswith(tuple(suffixes))]


def check_once(paths: Sequence[Path]) -> None:
    """Refuse two files with the same bytes: a copy, whose rows would be there twice. Raises DataError."""
    sizes: dict[int, list[Path]] = {}
    for path in paths:
        sizes.setdefault(path.stat().st_size, []).append(path)
    for alike in sizes.values():
        seen: dict[str, Path] = {}
        for path in alike if len(alike) > 1 else ():
            with path.open("rb") as file:
                first = seen.setdefault(hashlib.file_digest(file, "sha256").hexdigest(), path)
            if first != path:
                raise DataError(f"{path}: it has the same bytes as {first}: leave one of them out")


def is_there(path: Path) -> bool:
    """Return whether `path` is a file; one behind a folder that may not be entered counts as missing."""
    try:
        return path.is_file()
    except OSError:
        return False


def read_idx(path: Path, source: str = "its publisher") -> Tensor:
    """Return the uint8 tensor in an IDX file, gzipped where its name ends in `.gz`, in the shape its header states.

    Raises DataError where the file cannot be read, is no uint8 IDX file, or does not end where its header says.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read()
    except EOFError as error:
        raise broken(path, "the gzip stream is cut short", source) from error
    except (OSError, zlib.error) as error:
        raise broken(path, f"cannot be read ({error})", source) from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or data[3] == 0:
        raise broken(path, f"starts with {data[:4].hex() or 'nothing'}, which is not the magic of uint8 IDX", source)
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise broken(path, f"ends inside its header, after {len(data)} of {start} bytes", source)
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    expected, result = math.prod(shape), len(data) - start
    if expected == 0:
        raise broken(path, f"holds nothing: its header states the shape {shape}", source)
    if result != expected:
        problem = "is cut short" if result < expected else "has trailing bytes"
        raise broken(path, f"{problem}: shape {shape} needs {expected} bytes, {result} are there", source)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(shape)


def fetch(root: Path, name: str, urls: Sequence[str], md5: str, holds: str | None = None) -> Path:
    """Return the file `name` of the data directory `root`, downloading it first where it is missing.

    A file that is there is taken as it is, and so is the unpacked `x` for a missing `x.gz`. `urls` are mirrors, tried
    in order; a download has to have the checksum `md5` (hexadecimal). `holds` names the file wanted out of an archive,
    for the message. Raises DataError, leaving nothing behind, where no mirror gives the file.
    """
    path = root / name
    for present in (path, path.with_suffix("")) if path.suffix == ".gz" else (path,):
        if is_there(present):
            return present
    failures = []
    for url in urls:
        try:
            _download(url, path, md5)
            return path
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error or type(error).__name__}")
    wanted = name if holds is None else f"{holds} (or {name}, which holds it)"
    reasons = one_line("; ".join(failures))
    fix = f"copy it there, or set {ENVIRONMENT} to the folder that has it"
    raise DataError(f"{wanted} is not in {root} and did not download ({reasons}): {fix}")


def fetch_members(root: Path, members: Mapping[str, str], archive: str, url: str, md5: str) -> list[Path]:
    """Return the files of `root` named by the keys of `members`, taking missing ones out of an archive.

    The values are their names inside `archive` (.zip or .tar.gz), which is downloaded to `root` where missing, kept for
    other members, and must have the checksum `md5`. Only these members are written, each under its own key, so nothing
    in the archive can choose a path. Raises DataError as `fetch` does and for an archive that is not the published one.
    """
    missing = [name for name in members if not is_there(root / name)]
    if missing:
        path = fetch(root, archive, [url], md5, holds=missing[0])
        try:
            with path.open("rb") as file:
                result = hashlib.file_digest(file, _md5).hexdigest()
            if result != md5:
                raise broken(path, f"its md5 is {result}, not {md5}", url)
            with _opened(path) as member:
                for name in missing:
                    with member(members[name]) as source, whole(root / name) as target:
                        shutil.copyfileobj(source, target)
        except OSError as error:
            problem = one_line(str(error))
            raise DataError(f"{path}: cannot unpack {missing[0]} ({problem}); make room or mend the rights") from error
    return [root / name for name in members]


def _download(url: str, path: Path, md5: str) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "fedfleet"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        print(f"fedfleet: downloading {url} to {path}", file=sys.stderr)
        with whole(path) as target:
            digest = _md5()
            while chunk := response.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
            if digest.hexdigest() != md5:
                raise OSError(f"what came has md5 {digest.hexdigest()}, not {md5}")


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """Write beside `path` and rename at the end, so that a file under its own name is a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as scratch:
        part = Path(scratch) / path.name
        with part.open("wb") as file:
            yield file
        part.replace(path)


@contextmanager
def _opened(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    """Open an archive, giving the function that opens one of its members."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as members:
            yield members.open
    else:
        with tarfile.open(archive) as members:

            def regular(name: str) -> IO[bytes]:
                file = members.extractfile(name)
                if file is None:
                    raise OSError(f"{name} is no regular file")
                return file

            yield regular


def _md5() -> "hashlib._Hash":
    # It guards against broken downloads, not against an attacker; saying so keeps it working where FIPS rules.
    return hashlib.md5(usedforsecurity=False)
