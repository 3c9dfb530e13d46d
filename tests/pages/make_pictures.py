"""Makes the pictures of docs/show.md: `python -m tests.pages.make_pictures`.
Needs a Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.pages.browser import Page, browser, find_or_exit
from tests.pages.recorded import ROOT, record

PICTURES = ROOT / "docs" / "pictures"


def heading(page: Page, id: str) -> int:
    """How far above a plot its heading begins, in pixels."""
    return int(
        page.evaluate(
            f"""(() => {{
                let at = document.getElementById('{id}');
                const top = at.getBoundingClientRect().top;
                while (at.tagName !== 'H2') at = at.previousElementSibling;
                return Math.ceil(top - at.getBoundingClientRect().top) + 8;
            }})()"""
        )
    )


def main() -> int:
    program = find_or_exit()
    with tempfile.TemporaryDirectory() as folder, browser(program) as page:
        pages = record(Path(folder))
        page.resize(1280, 900)
        page.open(pages.show)
        page.screenshot(PICTURES / "show-page.png")
        page.screenshot(
            PICTURES / "show-timeline.png", "#timeline-0", before=heading(page, "timeline-0")
        )
        page.click("#map canvas", 0.6, 0.45)
        page.settle()
        page.screenshot(PICTURES / "show-module-by-step.png", "#explorer .views", before=90)
        page.screenshot(
            PICTURES / "show-magnitudes.png",
            "#magnitudes-modules",
            before=heading(page, "magnitudes-modules"),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
