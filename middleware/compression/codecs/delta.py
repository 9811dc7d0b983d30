"""The transform ``delta``: the server sends its difference from what clients have.

``compression/down.py`` has the memory.
"""

from __future__ import annotations

from typing import ClassVar

from fedfleet.middleware.compression.codecs.vectors import Options


class Delta(Options):
    """On the way down, the first: what comes after it is given what clients do not have yet, and what it loses is sent later
    (Gruntkowska et al. 2023)."""

    error_feedback: ClassVar[bool] = False
