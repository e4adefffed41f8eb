"""Adds pages from outside docs/ to the documentation site, and rewrites links to the paths that pages have there.

MkDocs calls these functions (`hooks` of mkdocs.yml). In the repository, README.md, docs and benchmarks link to each
other by their paths in the repository. On the site docs/ is the root, and README.md is the first page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Pages outside docs/: path in the repository -> path on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    **{f"benchmarks/{path.name}": f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md")},
}
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s#]*)(?P<heading>#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of `OUTSIDE`."""
    from mkdocs.structure.files import File

    for inside, outside in OUTSIDE.items():
        files.append(File.generated(config, outside, abs_src_path=str(ROOT / inside)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with its links rewritten."""
    return site_links(markdown, page.file.src_uri)


def site_links(markdown: str, page: str) -> str:
    """The page with its links rewritten for the site; a link to a file that is not on the site becomes plain text.

    Args:
        page: path of the page on the site.
    """
    place = {outside: inside for inside, outside in OUTSIDE.items()}.get(page, f"docs/{page}")

    def rewrite(found: re.Match[str]) -> str:
        text, target, heading = found["text"], found["target"], found["heading"] or ""
        if not target or "://" in target:
            return found[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if not (wanted.startswith("docs/") or wanted in OUTSIDE):
            return text.strip("![]")
        on_site = OUTSIDE.get(wanted, wanted.removeprefix("docs/"))
        return f"{text}({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{heading})"

    # Code is left as it is.
    parts = re.split(r"(^```.*?^```$|`[^`\n]*`)", markdown, flags=re.M | re.S)
    return "".join(part if number % 2 else LINK.sub(rewrite, part) for number, part in enumerate(parts))
