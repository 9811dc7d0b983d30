"""Hooks of MkDocs, which make pages of texts, notebooks, options and public names, and lead links to them."""

from __future__ import annotations

import base64
import importlib
import json
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from fedfleet.commands import show_named
from fedfleet.config.schema import Config
from fedfleet.middleware.compression.codecs.registry import TRANSFORMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "explanation/benchmarks.md",
}
"""Files of the repository that are pages of the site, and as what."""
KINDS = {name: of for name, of in show_named.kinds().items() if of.registry}
"""What can be named, but for what only packages name."""
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=(?:#[^)]*)?\))")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)
API = {
    "fedfleet": ["fedfleet.*"],
    "data": ["fedfleet.data.*"],
    "tasks": ["fedfleet.tasks.*", "fedfleet.tasks.stateful.prepared", "fedfleet.tasks.stateful.called"],
    "author": ["fedfleet.author.*"],
    "population": [f"fedfleet.simulator.population.{name}" for name in ("Population", "LocalData", "Summary")],
    "callbacks": ["fedfleet.tracking.callback.Callback", "fedfleet.tracking.callback.Begun"],
    "transforms": sorted({f"{t.options.__module__}.{t.options.__qualname__}" for t in TRANSFORMS.values()}),
}
"""Pages of Python, and the names that each has; * are the public ones of a module."""


def on_startup(**_: Any) -> None:
    """Copy the package without its links, which griffe, by which mkdocstrings reads it, does not follow."""
    copy = ROOT / "build" / "python" / "fedfleet"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "fedfleet", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "datasets" / "__init__.py").touch()


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and the files that pages link to."""
    for source, page in PAGES.items():
        _add(files, config, page, (ROOT / source).read_text(encoding="utf-8"))
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        text, pictures = notebook(path)
        _add(files, config, f"tutorials/{path.stem}.md", text)
        for name, picture in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=picture))
    _add(files, config, "reference/options/index.md", keys())
    for kind in KINDS:
        _add(files, config, f"reference/options/{kind}.md", options(kind))
    for page in API:
        _add(files, config, f"reference/api/{page}.md", api(page))
    texts = {home(f.src_uri): f.content_string for f in files.documentation_pages()}
    for where, text in texts.items():
        for link in LINK.findall(CODE.sub("", text)):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(where), link))
            page = placed(target)
            if page.startswith("files/") and files.get_file_from_path(page) is None and (ROOT / target).is_file():
                files.append(File.generated(config, page, content=(ROOT / target).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead where their files are on the site."""
    return relinked(markdown, page.file.src_uri)


def home(page: str) -> str:
    """Return where in the repository the text of a page stands; of one that is made, below docs/ all the same."""
    return next((source for source, name in PAGES.items() if name == page), f"docs/{page}")


def placed(target: str) -> str:
    """Return where on the site a file of the repository is."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/") and target.endswith(".ipynb"):
        target = target.removesuffix(".ipynb") + ".md"
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"


def relinked(markdown: str, page: str) -> str:
    """Return the text of a page with its links, which are those of the repository, as the site has them."""
    base, here = posixpath.dirname(home(page)), posixpath.dirname(page) or "."

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(base, found[1]))
        return posixpath.relpath(placed(target), here)

    parts, last = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(link, markdown[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, LINK.sub(link, markdown[last:])])


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as the text of a page, and its pictures by name; the notebook itself lies beside the page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts, pictures = [], {}
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![]({name})")
            elif "text/html" in data:
                parts.append(re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.S))
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    parts.insert(1, f'Download <a href="{path.name}">this page as a notebook</a> to run it.')
    return "\n\n".join(parts) + "\n", pictures


def keys() -> str:
    """Return a page of all keys of a configuration but what is named."""
    kinds = ", ".join(f"[{kind}]({kind}.md)" for kind in KINDS)
    return (
        "# Keys of a configuration\n\nMade, as the pages of what can be named, of the types that check it; `fedfleet show` and "
        f"`fedfleet schema` are, too. What can be named: {kinds}.\n\n{table(Config)}"
    )


def options(kind: str) -> str:
    """Return a page of every name of a kind: what `fedfleet show KIND NAME` says."""
    of, rows = KINDS[kind], KINDS[kind].registry
    head = f"What `{of.section}` names, by the key `{rows.key}`; `fedfleet show {kind} NAME` says the same."
    parts = [f"# {kind.capitalize()}\n\n{head}\n"]
    for name, entry in rows.items():
        parts.append(f"## {name}\n\n{escaped(rows.about(name))}\n")
        if source := entry.source:
            parts.append(f"```text\n{source}\n```\n")
        parts.append(table(entry.options))
        parts.append(f"```yaml\n{show_named.example(kind, name)}\n```\n")
    return "\n".join(parts)


def table(options: Any) -> str:
    """Return the options of a model in a table; nothing where there are none."""
    rows = [f"| `{name}` | {' | '.join(map(escaped, row))} |" for name, *row in show_named.fields(options)]
    return "\n".join(["| option | type | default | |", "|---|---|---|---|", *rows, ""]) if rows else ""


def api(page: str) -> str:
    """Return a page of public names."""
    names: list[str] = []
    for name in API[page]:
        module = name.removesuffix(".*")
        all_of = importlib.import_module(module).__all__ if module != name else ()
        names += [f"{module}.{each}" for each in all_of] or [name]
    head = "# fedfleet" if page == "fedfleet" else f"# {page.capitalize()}"
    return "\n\n".join([head, *(f"::: {name}" for name in names)]) + "\n"


def escaped(text: str) -> str:
    """Return text that Markdown takes as it is."""
    return re.sub(r"[\\`*_\[\]<>|#{}]", lambda found: f"&#{ord(found[0])};", text)


def _add(files: Files, config: Any, page: str, text: str) -> None:
    if files.get_file_from_path(page) is not None:
        raise PluginError(f"docs/{page} is made by docs/site/hooks.py: rename one of them")
    files.append(File.generated(config, page, content=text))
