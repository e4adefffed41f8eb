"""HTML that cannot be broken by what is put into it: all text is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

_EMPTY = {"img", "meta", "rect", "line", "polyline", "polygon", "circle", "br"}


class Html(str):
    """Text that is HTML already. Any other text is escaped where it becomes part of a page."""

    __slots__ = ()


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """An element with its content; parts that are None are left out, lists are their entries one after the other.

    Args:
        attributes: as `class_="wide"`; underscores stand for hyphens, a trailing one is dropped.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_escaped(_attribute(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _EMPTY and not content:
        return Html(f"<{tag}{given}/>")
    return Html(f"<{tag}{given}>{joined(content)}</{tag}>")


def joined(parts: Iterable[Any]) -> Html:
    """The parts one after the other, each escaped unless it is HTML."""
    found = []
    for part in parts:
        if part is None:
            continue
        if isinstance(part, Html):
            found.append(str(part))
        elif isinstance(part, list | tuple):
            found.append(str(joined(part)))
        else:
            found.append(_escaped(str(part)))
    return Html("".join(found))


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Html:
    """A table that scrolls by itself where the screen is too narrow; the first column names the row."""
    titles = element("tr", [element("th", cell, scope="col") for cell in head])
    lines = []
    for row in rows:
        first, *others = row
        lines.append(
            element("tr", element("th", first, scope="row"), [element("td", cell) for cell in others])
        )
    whole = element("table", element("thead", titles), element("tbody", lines))
    return element("div", whole, class_="scroll", tabindex="0")


def _escaped(text: str) -> str:
    """The text as HTML can hold it: names of files may have bytes that are no text, or control characters."""
    known = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return html.escape(
        "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in known)
    )


def _attribute(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
