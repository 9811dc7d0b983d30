"""BibTeX of a paper."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """A paper as BibTeX names it.

    Attributes:
        key: surname of the first author, year, first word of the title.
        authors: all of them, as ``Surname, Name and Surname, Name``.
        title: of the paper; braces keep capitals.
        where: the proceedings, or the journal; for a preprint ``arXiv:NUMBER``.
        year: in which it appeared there.

    """

    key: str
    authors: str
    title: str
    where: str
    year: int

    @property
    def bibtex(self) -> str:
        """Return an entry of a bibliography."""
        arxiv = self.where.removeprefix("arXiv:")
        if arxiv != self.where:
            kind, where = "misc", {"eprint": arxiv, "archivePrefix": "arXiv"}
        elif "Journal" in self.where or "Transactions" in self.where:
            kind, where = "article", {"journal": self.where}
        else:
            kind, where = "inproceedings", {"booktitle": self.where}
        fields = {"author": self.authors, "title": self.title, **where, "year": f"{self.year}"}
        lines = [f"  {name} = {{{value}}}" for name, value in fields.items()]
        return f"@{kind}{{{self.key},\n" + ",\n".join(lines) + "\n}"
