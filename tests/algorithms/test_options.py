"""Every option's default and bounds, of algorithms, tasks, transforms and attacks, as they stand in ``options.json``.

A configuration that leaves an option out is run with its default, so another one is another study: whoever changes one does it here
too, with ``python -m tests.algorithms.test_options``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from fedfleet.algorithms.options import AlgorithmOptions
from fedfleet.algorithms.registry import ALGORITHMS
from fedfleet.config.checking import section
from fedfleet.middleware.attacks.kinds.registry import ATTACKS
from fedfleet.middleware.compression.codecs.registry import TRANSFORMS
from fedfleet.tasks.options import TaskOptions
from fedfleet.tasks.registry import TASKS

FILE = Path(__file__).with_name("options.json")
PROSE = {"title", "description"}


def classes(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of options that a type reaches."""
    for part in get_args(kind):
        yield from classes(part)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for base in kind.__mro__:
            if issubclass(base, BaseModel) and base is not BaseModel:
                yield base
                for field in base.model_fields.values():
                    yield from classes(field.annotation)


def described() -> dict[str, Any]:
    """Return by module in fedfleet, class and name what an option may be, of the class that says so."""
    found: dict[str, Any] = {}
    for entry in (*ALGORITHMS.values(), *TASKS.values(), *TRANSFORMS.values(), *ATTACKS.values()):
        for kind in classes(entry.options):
            schema = kind.model_json_schema() if kind.model_fields else {}
            known = schema.get("anyOf", [schema])[-1].get(
                "properties", {}
            )  # the last, where a name alone may stand for it
            for name in kind.__annotations__.keys() & known.keys():
                where = f"{kind.__module__.partition('.')[2]}.{kind.__name__}.{name}"
                field = kind.model_fields[name]
                aside = PROSE if section(field.annotation, field.metadata) is None else {*PROSE, "anyOf"}  # every name
                found[where] = {k: v for k, v in known[name].items() if k not in aside}
    return json.loads(json.dumps(found))


def test_defaults_and_bounds_are_as_they_were_and_every_part_answers_the_engine():
    assert all(issubclass(entry.options, AlgorithmOptions) for entry in ALGORITHMS.values())
    assert all(issubclass(entry.options, TaskOptions) for entry in TASKS.values())
    assert described() == json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(what, sort_keys=True)}" for name, what in sorted(described().items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
