"""Writes docs/results.md and its figures from the records in results/.  Run: python tools/make_results.py"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from ecnn import files
from ecnn.pipeline import draw_results, results_page

ROOT = Path(__file__).parents[1]
FIGURES = "images/results"


def main() -> None:
    """Writes the page and its figures from committed files alone: needs no model, no images and no GPU."""
    files.write_text(ROOT / "docs/results.md", results_page(ROOT / "results", figures=FIGURES))
    for path in draw_results(ROOT / "results", ROOT / "docs" / FIGURES):
        shrink(path)
        print(path.relative_to(ROOT))


def shrink(path: Path) -> None:
    """Reduces a figure to 64 colours, which makes the file a third as large."""
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
