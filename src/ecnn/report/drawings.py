"""Figures of a report as inline SVG, which follows the page's colours, light or dark, and its width."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ecnn.codes import CodeMatrix
from ecnn.report.markup import Html, element

_WIDTH = 360  # of a figure in its own units: about pixels on a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 10, 8, 34
_MOST_COLOURS = 8
_LABELS = 52  # most width of the names to the left of a matrix
_MOST_HINTS = 2000  # cells of a matrix, up to which each has a tooltip
_FEWEST_PIXELS = 18  # sides of a cell, from which it has room for a number


@dataclass(frozen=True)
class Line:
    """A line of a chart; a single point is drawn as a dot.

    Attributes:
        name: in the legend.
        points: (x, y) in order.
        band: the interval (low, high) of each point; empty without intervals.
    """

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()


def chart(
    lines: Sequence[Line], *, x_title: str, y_title: str, most: float | None = None, label: str = ""
) -> Html:
    """A chart of lines whose two axes start at 0, with a legend below.

    Args:
        most: upper end of the y axis; a little above the largest value if not given.
        label: a description for screen readers.
    """
    height = 210
    widest = max((x for line in lines for x, _ in line.points), default=1) or 1
    top = most or max((y for line in lines for _, y in line.points), default=1) * 1.05 or 1
    right, bottom = _WIDTH - _RIGHT, height - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(_LEFT + x / widest * (right - _LEFT), 1),
            round(bottom - y / top * (bottom - _TOP), 1),
        )

    parts: list[Html] = []
    for tick in _ticks(top):
        x, y = place(0, tick)
        parts.append(element("line", x1=x, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", _number(tick), x=x - 5, y=y + 4, text_anchor="end"))
    for tick in _ticks(widest):
        x, y = place(tick, 0)
        anchor = "end" if x > right - 10 else "middle"
        parts.append(element("text", _number(tick), x=x, y=y + 14, text_anchor=anchor))
    for number, line in enumerate(lines):
        parts += _line_parts(line, f"c{number % _MOST_COLOURS}", place)
    parts.append(element("text", x_title, x=(_LEFT + right) / 2, y=height - 4, text_anchor="middle"))
    middle = (_TOP + bottom) / 2
    turned = f"rotate(-90 10 {middle:g})"
    parts.append(element("text", y_title, x=10, y=middle, text_anchor="middle", transform=turned))
    names = [
        element("li", element("span", class_=f"key c{number % _MOST_COLOURS}"), line.name)
        for number, line in enumerate(lines)
    ]
    legend = element("ul", names, class_="legend") if lines else None
    return element("div", _svg(parts, _WIDTH, height, label), legend, class_="chart")


def _line_parts(line: Line, colour: str, at: Callable[[float, float], tuple[float, float]]) -> list[Html]:
    parts, places = [], [at(x, y) for x, y in line.points]
    if line.band and len(places) > 1:
        lows = [at(x, low) for (x, _), (low, _) in zip(line.points, line.band, strict=True)]
        highs = [at(x, high) for (x, _), (_, high) in zip(line.points, line.band, strict=True)]
        parts.append(element("polygon", points=_path([*lows, *highs[::-1]]), class_=f"band {colour}"))
    elif line.band:
        (x, low), (_, high) = (at(line.points[0][0], end) for end in line.band[0])
        parts.append(element("line", x1=x, x2=x, y1=low, y2=high, class_=f"line {colour}"))
    if len(places) > 1:
        parts.append(element("polyline", points=_path(places), class_=f"line {colour}"))
    if len(places) <= 12:
        parts += [element("circle", cx=x, cy=y, r=3, class_=f"dot {colour}") for x, y in places]
    return parts


def code_matrix(code: CodeMatrix, names: Sequence[str]) -> Html:
    """The code as a matrix with a row per class; the higher the symbol, the more opaque its cell."""
    shares = code.symbols / max(code.arity - 1, 1)
    return _matrix(shares, names, "ink", f"the code, {code.num_classes} classes by {code.code_length} tasks")


def heat_map(
    shares: np.ndarray,
    names: Sequence[str],
    *,
    columns: Sequence[str] = (),
    label: str,
    texts: np.ndarray | None = None,
) -> Html:
    """Shares from 0 to 1 as colours, with numbers if the cells are large enough; a cell of NaN is left grey.

    Args:
        names: of the rows.
        columns: names of the columns; empty draws none.
        label: a description for screen readers.
        texts: of the cells; the shares in per cent if not given.
    """
    if texts is None:
        texts = np.array([[_percent(share) for share in row] for row in shares], dtype=object)
    return _matrix(shares, names, "heat", label, columns, texts)


def _matrix(
    shares: np.ndarray,
    names: Sequence[str],
    colour: str,
    label: str,
    columns: Sequence[str] = (),
    texts: np.ndarray | None = None,
) -> Html:
    rows, width = shares.shape
    left = min(_LABELS, 8 + 6 * max((len(name) for name in names), default=0))
    cell = (_WIDTH - left - 1) / width
    tall = min(max(cell, 200 / max(rows, 1)), 26) if cell < 14 else min(cell, 34)
    tall = max(tall, 2.5)
    top = 14 if columns else 2
    parts: list[Html] = []
    step = max(1, -(-10 // max(int(tall), 1)))
    for row, name in enumerate(names):
        if row % step == 0:
            short = name if len(name) <= 7 else f"{name[:6]}\u2026"
            middle = top + (row + 0.5) * tall + 4
            parts.append(
                element("text", element("title", name), short, x=left - 4, y=middle, text_anchor="end")
            )
    for column, name in enumerate(columns):
        if column % max(1, round(18 / cell)) == 0:
            parts.append(
                element("text", name, x=left + (column + 0.5) * cell, y=top - 3, text_anchor="middle")
            )
    for (row, column), share in np.ndenumerate(shares):
        x, y = left + column * cell, top + row * tall
        hint = None
        if texts is not None and shares.size <= _MOST_HINTS:
            column_name = columns[column] if columns else column
            hint = element("title", f"{names[row]}, {column_name}: {texts[row, column]}")
        known = not np.isnan(share)
        parts.append(
            element(
                "rect",
                hint,
                x=round(x, 2),
                y=round(y, 2),
                width=round(cell * 0.94, 2),
                height=round(tall * 0.94, 2),
                class_=f"cell {colour if known else 'unknown'}",
                fill_opacity=round(0.06 + 0.84 * float(share), 3) if known else None,
            )
        )
        if texts is not None and known and min(cell, tall) >= _FEWEST_PIXELS:
            middle = (x + cell * 0.47, y + tall * 0.47 + 4)
            parts.append(
                element(
                    "text", texts[row, column], x=middle[0], y=middle[1], text_anchor="middle", class_="in"
                )
            )
    return _svg(parts, _WIDTH, round(top + rows * tall + 2), label)


def picture(pixels: np.ndarray, description: str) -> Html:
    """An image (channel, height, width) in [0, 1] as an <img> element that contains the PNG."""
    from PIL import Image

    values = (np.clip(pixels, 0, 1) * 255).round().astype(np.uint8)
    made = Image.fromarray(values[0]) if len(values) == 1 else Image.fromarray(values[:3].transpose(1, 2, 0))
    written = io.BytesIO()
    made.save(written, format="PNG", optimize=True)
    data = base64.b64encode(written.getvalue()).decode()
    return element("img", src=f"data:image/png;base64,{data}", alt=description)


def bars(values: Mapping[str, tuple[float, str]], *, label: str) -> Html:
    """Horizontal bars by name; each has a length from 0 to 1 and a text."""
    parts: list[Html] = []
    for row, (name, (share, text)) in enumerate(values.items()):
        y = 4 + row * 34
        parts.append(element("text", name, x=0, y=y + 10))
        parts.append(element("text", text, x=_WIDTH, y=y + 10, text_anchor="end"))
        parts.append(element("rect", x=0, y=y + 14, width=_WIDTH, height=9, class_="track"))
        parts.append(element("rect", x=0, y=y + 14, width=round(_WIDTH * share, 1), height=9, class_="bar"))
    return _svg(parts, _WIDTH, 6 + 34 * len(values), label)


def _svg(parts: list[Html], width: float, height: float, label: str) -> Html:
    return element("svg", parts, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label or None)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)


def _ticks(most: float) -> list[float]:
    """A few round numbers from 0 to at most `most`."""
    if not most > 0:
        return [0.0]
    rough = most / 4
    size = 10.0 ** np.floor(np.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [float(value) for value in np.arange(0, most * 1.0001, step)]


def _number(value: float) -> str:
    return f"{value:.3g}"


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f"{100 * share:.0f}"
