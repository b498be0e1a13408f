"""Hooks of mkdocs: links that are right on the site and in the repository, and pages for files outside of docs/.

A page links to files as they lie in the repository (``../../examples/own_loop.py``, ``../SECURITY.md``), because readers
open it there too. Here such a link becomes one to the page that the site makes of the file. A link to any other file of
the repository becomes text; one to a file that does not exist is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

#: File of the repository -> page of the site.
TEXTS = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
EXAMPLES = "project/examples.md"

#: Pages that a search shows last: long, and for those who work on shardwise.
RECORDS = ("notes/", "project/changelog.md")

#: Pages whose tables need the room of the table of contents.
WIDE = ("supported-models.md", "comparison.md")

_FENCE = re.compile(r"^\s*```")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CLASS = re.compile(r"^::: class (\w+)$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """The header shows the version next to the link to the repository."""
    text = (ROOT / "src" / "shardwise" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise PluginError("src/shardwise/__init__.py has no __version__")
    config.repo_name = f"shardwise {found[1]}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of files that lie outside of docs/."""
    for source, page in TEXTS.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, EXAMPLES, content=_examples()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links of the site, and ``::: class X`` into where X lies."""
    page_uri = page.file.src_uri
    if page_uri in WIDE:
        page.meta["hide"] = ["toc"]
    if page_uri.startswith(RECORDS):
        page.meta.setdefault("search", {"boost": 0.2})
    at = next((source for source, made in TEXTS.items() if made == page_uri), f"docs/{page_uri}")
    lines, in_code = [], False
    for line in _CLASS.sub(lambda found: f"::: {_home_of(found[1])}", markdown).split("\n"):
        in_code ^= bool(_FENCE.match(line))
        lines.append(line if in_code else _LINK.sub(lambda found: _link(found, at, page_uri), line))
    return "\n".join(lines)


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs-click 0.9 shows click's mark for "no default" (click 8.3 and later) as if it were one."""
    return html.replace("<code>Sentinel.UNSET</code>", "")


def _link(found: re.Match[str], at: str, page_uri: str) -> str:
    text, target = found.groups()
    if re.match(r"[a-z]+:|#|/", target):
        return found[0]
    path, _, anchor = target.partition("#")
    full = posixpath.normpath(posixpath.join(posixpath.dirname(at), path))
    if not (ROOT / full).exists() and full != f"docs/{EXAMPLES}":
        raise PluginError(f"{at}: the link {target} leads to {full}, which does not exist")
    if full.startswith("docs/"):
        goal = full.removeprefix("docs/")
    elif full in TEXTS:
        goal = TEXTS[full]
    elif full.startswith("examples/"):
        goal, anchor = EXAMPLES, _anchor(posixpath.basename(full))
    elif full == "README.md":
        goal = "index.md"
    else:
        return text
    relative = posixpath.relpath(goal, posixpath.dirname(page_uri) or ".")
    return f"[{text}]({relative}{'#' + anchor if anchor else ''})"


def _home_of(name: str) -> str:
    """The module path of a class of the package: reports are public by what returns them, not by where they lie."""
    package = ROOT / "src" / "shardwise"
    homes = [
        file
        for file in sorted(package.rglob("*.py"))
        if re.search(rf"^class {name}\b", file.read_text(), re.MULTILINE)
    ]
    if len(homes) != 1:
        raise PluginError(f"expected one class {name} in src/shardwise, got {[str(h) for h in homes]}")
    return ".".join(("shardwise", *homes[0].relative_to(package).with_suffix("").parts, name))


def _anchor(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")


def _examples() -> str:
    """One page with the full text of every example."""
    lines = [
        "# Examples",
        "",
        "Each file is a complete program that runs on CPUs. Its first lines say how to launch it.",
        "",
    ]
    for file in sorted((ROOT / "examples").iterdir()):
        if file.suffix not in (".py", ".yaml"):
            continue
        language = "python" if file.suffix == ".py" else "yaml"
        lines += [f"## {file.name} {{ #{_anchor(file.name)} }}", "", f"`examples/{file.name}`", ""]
        lines += [f"```{language}", file.read_text().rstrip(), "```", ""]
    return "\n".join(lines)
