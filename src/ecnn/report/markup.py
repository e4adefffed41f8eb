"""Builds HTML safely: all text is escaped, unless it is HTML that was built here."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

_EMPTY = {"img", "meta", "rect", "line", "polyline", "polygon", "circle", "br"}


class Html(str):
    """Text that is HTML already, and is put into a page unescaped."""

    __slots__ = ()


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """An HTML element with its content; parts that are None are left out, and lists are flattened.

    Args:
        attributes: such as `class_="wide"`: a trailing underscore is dropped, others become hyphens. None leaves the
            attribute out.
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
    """The parts joined, each escaped unless it is HTML; None is left out, and lists are flattened."""
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
    """A table whose first column names the rows; on a narrow screen it scrolls sideways, without the page."""
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
    """The text escaped for HTML; invalid bytes and control characters, as in names of files, are replaced."""
    known = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return html.escape(
        "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in known)
    )


def _attribute(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
