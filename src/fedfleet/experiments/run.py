"""A finished run, as it is returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its summary, its tables."""

    folder: Path
    summary: Mapping[str, Any]

    def table(self, name: str) -> pd.DataFrame:
        """Return a table of the run folder: "rounds", "phases", "fates" or "clients"."""
        return pd.read_parquet(self.folder / f"{name}.parquet")

    @property
    def rounds(self) -> pd.DataFrame:
        """Return ``rounds.parquet``."""
        return self.table("rounds")
