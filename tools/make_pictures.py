"""Makes the picture of a report that the README shows: python tools/make_pictures.py out/report.html

The page is what `ecnn quickstart` writes. Needs a Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 900, 1250


def main(page: Path, out: Path) -> None:
    """Writes the top of the page as a PNG of few colours, which is small."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        size = f"--window-size={WIDTH},{HEIGHT}"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", size, f"--screenshot={shot}"]
        command = [browser, *options, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 an installed browser
        out.parent.mkdir(parents=True, exist_ok=True)
        Image.open(shot).convert("RGB").quantize(256).save(out, optimize=True)
    print(f"wrote {out}, {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", default=ROOT / "out" / "report.html")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "report.png")
    given = parser.parse_args()
    main(given.page, given.out)
