"""Code that a configuration names as ``module:name``: how it is found, called, and sent to workers.

A module is looked for where Python looks, then in the current folder, then in the configuration's ``code_dir``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError

from fedfleet.simulator.errors import ConfigError, one_line
from fedfleet.simulator.signals import contained

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
MANY = 12  # names that are told
_mine: dict[str, None] = {}  # top-level modules that were found by their path and are installed nowhere


def is_path(text: object) -> bool:
    """Say whether a text has the form ``module:name``."""
    return isinstance(text, str) and PATH.fullmatch(text) is not None


def has(folder: str | Path, text: str) -> bool:
    """Say whether the module of a ``module:name`` lies in a folder."""
    top = text.partition(":")[0].partition(".")[0]
    return PathFinder.find_spec(top, [str(folder)]) is not None


def found(key: str, text: str, code_dir: str | None = None) -> Any:
    """Return what ``text``, a ``module:name``, is. Raises ConfigError of one line that names the key."""
    name, _, attribute = text.partition(":")
    said, cwd = f"{key}={text!r}", str(Path.cwd())
    folders = [cwd] if code_dir is None else [cwd, str(Path(code_dir).expanduser().absolute())]
    if code_dir is not None and not Path(folders[1]).is_dir():
        raise ConfigError(f"code_dir={code_dir!r}: no such folder: give the folder of your modules")
    sys.path += [f for f in folders if f not in sys.path]  # for good: modules import others when they are called
    x: Any = _imported(said, name, folders)
    _check_alone(said, x, name, folders)
    if _is_mine(x):
        _mine[name.partition(".")[0]] = None
    for part in attribute.split("."):
        if not hasattr(x, part):
            there = sorted(k for k, v in vars(x).items() if callable(v) and not k.startswith("_"))
            raise ConfigError(f"{said}: {name} has no {part!r}: {_nearest(part, there)}")
        x = getattr(x, part)
    if not callable(x):
        raise ConfigError(f"{said}: it is a {type(x).__name__}, and is to be called: give a function or a class")
    if _is_pythons(x):
        raise ConfigError(
            f"{said}: it is of Python's own library, and makes nothing that belongs here: name one of your own"
        )
    return x


def _is_pythons(x: Any) -> bool:
    """Say whether a function or class is of Python's own library, such as what runs commands or removes files."""
    while isinstance(x, partial):
        x = x.func
    name = getattr(x, "__module__", None) or ""
    return name.partition(".")[0] in sys.stdlib_module_names and not _is_mine(sys.modules.get(name))


def called(said: str, arguments_key: str, f: Callable[..., Any], given: Mapping[str, Any], **offered: Any) -> Any:
    """Return ``f(**given)``, with those ``offered`` that its signature names and that are not given.

    Those of a dataclass or a pydantic model are of its fields' types. ``arguments_key`` is empty where no configuration gives them.
    Raises ConfigError for arguments that are not, that it does not take, or has to have.
    """
    called_as = getattr(f.func if isinstance(f, partial) else f, "__name__", type(f).__name__)
    try:
        takes = inspect.signature(f).parameters
    except (TypeError, ValueError):  # of what is compiled
        with contained():
            return f(**given)
    by_name = [n for n, p in takes.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    rest = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if strange := [n for n in given if n not in by_name and not rest]:
        known = [n for n in by_name if n not in offered]
        raise ConfigError(
            f"{arguments_key}.{strange[0]}={given[strange[0]]!r}: {called_as} takes no such argument: "
            f"{_nearest(strange[0], known) if known else 'leave it out'}"
        )
    given = _typed(f, arguments_key, given)
    whole = {**{n: v for n, v in offered.items() if n in by_name}, **given}
    if lacking := [n for n, p in takes.items() if n not in whole and p.default is p.empty and n in by_name]:
        fix = f"give {arguments_key}.{lacking[0]}"
        if not arguments_key:  # made in Python
            fix = f"give a function that makes it, lambda: {called_as}({lacking[0]}=…)"
        raise ConfigError(f"{said}: {called_as} needs {lacking[0]!r}: {fix}")
    try:
        with contained():
            return f(**whole)
    except ValidationError as e:  # of rules over several fields
        raise ConfigError(f"{said}: {called_as}: {_explained(e)}") from None


def parameters(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none of one that is compiled."""
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):
        return {}


def annotated(f: Callable[..., Any], name: str) -> Any:
    """Return the annotation of a parameter, evaluated if its module has the names; None where there is none."""
    takes = parameters(f)
    if name not in takes or takes[name].annotation is inspect.Parameter.empty:
        return None
    result = takes[name].annotation
    while isinstance(f, partial):
        f = f.func
    if isinstance(result, str):
        module = sys.modules.get(getattr(f, "__module__", None) or "")
        known = getattr(inspect.unwrap(f), "__globals__", None) or vars(module or object)
        with suppress(Exception):  # of names that are not there
            return get_type_hints(SimpleNamespace(__annotations__={name: result}), known)[name]
    return result


def _typed(f: Callable[..., Any], key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as the fields of a dataclass or of a pydantic model have them; those of anything else as they are.

    Raises ConfigError for one that is not of its field's type or within its bounds; as in the rest of a configuration, text is no
    number.
    """
    if not isinstance(f, type) or not (issubclass(f, BaseModel) or is_dataclass(f)):
        return dict(given)
    hints: dict[str, Any] = (
        {n: Annotated[field.annotation, field] for n, field in f.model_fields.items()}
        if issubclass(f, BaseModel)
        else _hints(f)
    )
    result = dict(given)
    for name, value in given.items():
        try:
            field = TypeAdapter(hints[name]) if name in hints else None
        except PydanticUserError:  # a type that no text has
            continue
        try:
            result[name] = value if field is None else field.validate_json(json.dumps(value), strict=True)
        except ValidationError as e:
            raise ConfigError(f"{key}.{name}={value!r}: {_explained(e)}") from None
    return result


def _hints(f: type) -> dict[str, Any]:
    try:
        return get_type_hints(f, include_extras=True)
    except Exception:  # of names that are not there
        return {}


def _explained(e: ValidationError) -> str:
    text = e.errors()[0]["msg"]
    return one_line(text[0].lower() + text[1:]).removeprefix("value error, ")


def home(x: Any) -> str | None:
    """Return the folder in which the top-level module of a function or class lies; None for what is installed or has no file."""
    module = sys.modules.get(getattr(x, "__module__", None) or "")
    if module is None or not _is_mine(module):
        return None
    return str(Path(str(module.__file__)).resolve().parents[_depth(module)])


def sent_whole() -> list[ModuleType]:
    """Return the modules whose code workers are sent, since theirs would not find it."""
    return [sys.modules[name] for name in _mine if name in sys.modules]


def _imported(said: str, name: str, folders: list[str]) -> ModuleType:
    before = set(sys.modules)
    try:
        with contained():
            module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(f"{e.name}.")):
            raise ConfigError(f"{said}: {name} imports {e.name!r}, which is not there: install it, or mend that") from e
        raise ConfigError(f"{said}: there is no module {e.name!r}: {_modules(e.name, folders)}") from None
    except Exception as e:
        raise ConfigError(f"{said}: {name} cannot be imported ({type(e).__name__}: {one_line(e)}): mend it") from e
    for new in {m.partition(".")[0] for m in set(sys.modules) - before}:
        if _is_mine(sys.modules.get(new)):
            _mine[new] = None
    return module


def _modules(wanted: str, folders: Iterable[str]) -> str:
    """Say which modules there are in some folders."""
    top, _, below = wanted.rpartition(".")
    if top and (package := sys.modules.get(top)) is not None:
        folders = getattr(package, "__path__", ())
    there = set()
    for folder in map(Path, folders):
        there |= {p.stem for p in folder.glob("*.py") if p.stem.isidentifier() and p.stem != "__init__"}
        there |= {p.parent.name for p in folder.glob("*/__init__.py")}
    where = " and ".join(dict.fromkeys(map(str, folders)))
    return f"{_nearest(below, sorted(there))} (looked where Python does, and in {where})"


def _nearest(wanted: str, there: list[str]) -> str:
    near = difflib.get_close_matches(wanted, there, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = ", …" if len(there) > MANY else ""
    return f"{hint}there {'is' if len(there) == 1 else 'are'} {', '.join(there[:MANY]) or 'none'}{more}"


def _check_alone(said: str, module: ModuleType, name: str, folders: list[str]) -> None:
    """Refuse a module that was loaded from elsewhere, where ``code_dir`` has another of that name."""
    if len(folders) < 2 or not _is_mine(module) or not has(folders[1], name):
        return
    loaded = Path(str(module.__file__)).resolve().parents[_depth(module)]
    if loaded != Path(folders[1]).resolve():
        raise ConfigError(
            f"{said}: {name} was loaded from {loaded}, and there is another in {folders[1]}: call one of them otherwise"
        )


def _depth(module: ModuleType) -> int:
    return module.__name__.count(".") + (Path(str(module.__file__)).name == "__init__.py")


def _is_mine(module: ModuleType | None) -> bool:
    """Say whether a module is a file of an author's: neither installed, nor Python's, nor fedfleet's."""
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str) or module.__name__.partition(".")[0] in ("fedfleet", "__main__"):
        return False
    path = Path(file).resolve()
    paths = sysconfig.get_paths()
    installed = [Path(paths[k]).resolve() for k in ("stdlib", "platstdlib", "purelib", "platlib") if k in paths]
    return not ({"site-packages", "dist-packages"} & {*path.parts} or {*installed} & {*path.parents})
