"""Data frames of results, which are printed with all their columns."""

from __future__ import annotations

from shutil import get_terminal_size

import pandas as pd


class Whole(pd.DataFrame):
    """A data frame whose columns are all printed, in blocks as wide as the terminal, and so are those of what is made of it.

    pandas leaves out columns in the middle where a terminal is narrow. Rows are cut as pandas cuts them.
    """

    @property
    def _constructor(self) -> type[Whole]:
        return Whole

    def __repr__(self) -> str:
        """Return the frame as text."""
        with pd.option_context("display.max_columns", None, "display.width", get_terminal_size().columns):
            return super().__repr__()

    def _repr_html_(self) -> str | None:
        """Return what a notebook shows."""
        with pd.option_context("display.max_columns", None):
            return super()._repr_html_()  # pyright: ignore
