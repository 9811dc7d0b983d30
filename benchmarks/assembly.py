"""Count what a configuration passes on its way to a run: ``python -m benchmarks.assembly configs/cdma/digits.yaml``.

For each stage it prints the files of the product in which a function was called, imports left out, the functions, and how often
named sections were validated. ``--inner batched`` leaves out the trial by which ``executor.inner: auto`` chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import fedfleet
from benchmarks import command

SOURCE = Path(fedfleet.__file__).resolve().parent
LINKED = tuple(path for path in SOURCE.iterdir() if path.is_symlink())
BELOW = tuple(f"{path}/" for path in (SOURCE, *(path.resolve() for path in LINKED)))
VALIDATES = "Registry._validated"


class Entered(NamedTuple):
    """Functions of the product that were called: their names, as often as each was, by file."""

    calls: dict[tuple[str, str], int]

    @property
    def files(self) -> set[str]:
        """The files that they are in."""
        return {file for file, _ in self.calls}

    @property
    def validations(self) -> int:
        """Validations of named sections."""
        return sum(n for (_, name), n in self.calls.items() if name == VALIDATES)

    def beside(self, other: Entered) -> Entered:
        """Return both together."""
        return Entered({k: self.calls.get(k, 0) + other.calls.get(k, 0) for k in self.calls | other.calls})


def entered(work: Callable[[], Any]) -> tuple[Any, Entered]:
    """Return what some work returns, and what it called."""
    calls: dict[tuple[str, str], int] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # A module and a class body run at an import; neither has locals that the compiler optimises.
        if event == "call" and code.co_flags & 1 and code.co_filename.startswith(BELOW):
            at = code.co_filename, code.co_qualname
            calls[at] = calls.get(at, 0) + 1

    sys.setprofile(watch)
    try:
        found = work()
    finally:
        sys.setprofile(None)
    return found, Entered(calls)


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.assembly", __doc__)
    ask.add_argument("config", type=Path, help="a configuration")
    ask.add_argument(
        "--inner", choices=["serial", "batched", "factored"], help="how clients are computed; default: as it says"
    )
    args = ask.parse_args(argv)
    more = {} if args.inner is None else {"executor.inner": args.inner, "executor.block_size": 10}
    fedfleet.Experiment(fedfleet.load(args.config, more))  # imports, and what is kept of them
    config, first = entered(lambda: fedfleet.load(args.config, more))
    _, second = entered(lambda: fedfleet.Experiment(config))
    rows = [
        [name, str(len(part.files)), str(len(part.calls)), str(sum(part.calls.values())), str(part.validations)]
        for name, part in (("load", first), ("Experiment", second), ("both", first.beside(second)))
    ]
    command.show(f"{args.config}", ["stage", "files", "functions", "calls", "validations of a section"], rows)


if __name__ == "__main__":
    main()
