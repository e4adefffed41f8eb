"""Makes docs/images/page.png: serves a run, attacks a test image in a real Chromium, and takes a picture of the page.

Run: python tools/make_page_picture.py out/ecnn --compare out/plain --example 3 --eps 0.12
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page.png"


def take_picture(address: str, out: Path, example: int, eps: float) -> None:
    """A picture of the page after an attack on one of its examples."""
    with sync_playwright() as player:
        chromium = (
            shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        )
        alone = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = player.chromium.launch(executable_path=chromium, args=alone)
        page = browser.new_page(viewport={"width": 1120, "height": 880}, color_scheme="light")
        page.goto(address)
        page.wait_for_selector("#code tbody tr.decoded")
        page.locator("#examples button").nth(example).click()
        page.fill("#eps-number", str(eps))
        page.wait_for_selector("#go:not([disabled])")
        page.click("#go")
        page.wait_for_selector("#undo:not([disabled])")
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(500)  # bars grow to their length
        out.parent.mkdir(parents=True, exist_ok=True)
        taken = page.screenshot(full_page=True)
        browser.close()
    # A page has few colours: a palette of them makes the file three times smaller.
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(
        256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    ).save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run folder or the name of a shipped model")
    parser.add_argument("--compare", help="another")
    parser.add_argument(
        "--example", type=int, default=3, help="which of the test images that the page offers"
    )
    parser.add_argument("--eps", type=float, default=0.12)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    command = [sys.executable, "-m", "ecnn", "serve", options.run, "--port", "0"]
    command += ["--compare", options.compare] if options.compare else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 our own command
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        try:
            assert found is not None, "the server did not start"
            take_picture(found[0], options.out, options.example, options.eps)
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
