"""Errors a user can mend: one line saying what is wrong and how to mend it."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any


def printable(text: str) -> str:
    """Return a text on one line: a file or a value named in it may hold any character."""
    return "".join(c if c.isprintable() else "?" for c in text)


def of_kind(x: Any) -> str:
    """Return what a value is, in words: "nothing", "an int", "a dict"."""
    name = type(x).__name__
    return "nothing" if x is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


class FedfleetError(Exception):
    """An error whose message is meant for the user, without a traceback of ours."""


class ConfigError(FedfleetError, ValueError):
    """A configuration that cannot run; one line that names the key, the value and the mend."""

    def __init__(self, message: str):
        super().__init__(printable(message))


INEXACT = "does not have a deterministic implementation"
"""Torch's words for an operation that no GPU does with the same bits each time."""
INEXACT_MEND = (
    "use another operation, or set executor.deterministic=false, and the record says that bits differ from run to run"
)


class ClientError(FedfleetError):
    """Client code raised, or sent something that cannot be averaged."""

    @classmethod
    def at(cls, client: int, phase: str, step: str, error: BaseException) -> ClientError:
        """Name where it happened: in which client, phase and step; the original error is chained by the caller."""
        said = one_line(error)
        fix = "" if INEXACT not in said else f": {INEXACT_MEND}"
        if isinstance(error, TypeError) and "operand" in said and "'dict'" in said:
            fix = ": trees are combined by T, as in T.axpy(-lr, direction, z)"
        if said.startswith("trees differ") and "nothing" in said:
            fix = ": a client's state is None where Phase.client_state makes none"
        return cls(f"client {client}, phase {phase!r}, {step}: {type(error).__name__}: {said}{fix}")

    def told(self) -> str:
        """Return the message, followed by the traceback of the original error if there is one."""
        return str(self) if self.__cause__ is None else f"{self}\n{traced(self.__cause__)}"

    def __reduce__(self) -> tuple[type[ClientError], tuple[str]]:
        """Travel between processes as the message alone."""
        return type(self), (str(self),)


class ClientTimeout(ClientError):
    """Client code did not come to an end."""


OURS = (str(Path(__file__).parent), f"torch{os.sep}_functorch")
"""Parts of the paths of files that call client code."""


def traced(error: BaseException) -> str:
    """Return an error's traceback as text: from the author's code on, and without what else was being tried."""
    told = traceback.TracebackException.from_exception(error)
    told.__context__ = None
    calls = [any(part in frame.filename for part in OURS) for frame in told.stack]
    theirs = calls.index(False) if False in calls else max(0, len(calls) - 1)
    del told.stack[:theirs]
    lines = "".join(told.format()).rstrip().split("\n")
    return "\n".join(_cut(printable(line)) for line in lines)


LONGEST = 5000
"""Letters of a line of a message."""


def one_line(text: object) -> str:
    """Return a text, or what an error says, on one line; of an error that cannot say it, why."""
    try:
        result = _without_number(text) if isinstance(text, OSError) else str(text)
    except (Exception, SystemExit, GeneratorExit) as e:
        result = f"its text raises {type(e).__name__}"
    return _cut(printable(" ".join(result.split())))


def _without_number(error: OSError) -> str:
    """Return what an error of the system says, without its number: No such file or directory: 'here'."""
    return str(error).removeprefix(f"[Errno {error.errno}] ")


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def show(value: Any) -> str:
    """Return a value as it stands in a message: one line, not too long."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "..."
    return text if len(text) <= 80 else f"{text[:77]}..."
