"""Base classes of attacks: who attacks, and what an attack may do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from fedfleet.simulator.author import Key, Options, Tree, UploadMatrix


class NoAttack(Options):
    """Nobody attacks."""

    poisons: ClassVar[bool] = False
    colludes: ClassVar[bool] = False


class Attack(NoAttack):
    """Some clients attack, by what they send, what they learn from, or what they agree on.

    ``poisons``: they hold other examples, see ``poison`` and ``aimed``. ``forges``: each sends something else, see ``forged``.
    ``colludes``: all that are heard in an exchange send what they make of what they know together, see ``colluded``.
    """

    share: float | None = Field(default=None, ge=0, le=1)
    """Share of all clients that attack, drawn from ``seed``; this or ``clients``."""
    clients: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Numbers of the clients that attack, from 0."""

    @model_validator(mode="after")
    def _somebody(self) -> Attack:
        if (self.share is None) == (self.clients is None):
            raise ValueError("who attacks? give share, such as 0.2, or clients, a list of their numbers, and not both")
        if self.clients is not None and (min(self.clients) < 0 or len({*self.clients}) < len(self.clients)):
            raise ValueError("clients are numbers from 0, each once")
        return self

    @property
    def forges(self) -> bool:
        """Whether a client sends something else than what it has computed, by itself."""
        return False

    def forged(self, moved: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
        """Return what is sent in the place of a slot: path -> leaf, floats, of one client; a model's as what it moved by."""
        raise NotImplementedError

    def colluded(self, uploads: UploadMatrix, theirs: Tensor, origin: Tree) -> UploadMatrix:
        """Return the uploads heard in an exchange with the attackers', a mask (S,), replaced.

        ``origin`` is the model that they moved from, None where differences are sent.
        """
        raise NotImplementedError

    def poison(self, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return what examples of an attacker become: inputs (n, ...) as they are stored, and labels (n,)."""
        raise NotImplementedError

    def aimed(self, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return the test examples that the attack is aimed at, with the labels that a model is to give them."""
        raise NotImplementedError

    @property
    def poisoned_share(self) -> float:
        """The share of an attacker's examples that are poisoned."""
        return 1.0

    def check(self, x: Tensor, classes: int) -> None:
        """Raise ValueError where examples like these (n, ...) cannot be poisoned."""
