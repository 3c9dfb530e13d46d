"""Makes the pictures of docs/pictures-without-a-server.md: `python -m tests.pages.make_pictures`.
Needs a Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.pages.browser import Page, browser, find
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
    program = find()
    if program is None:
        print(
            "no browser: install Debian's `chromium`, or name a Chromium's program in BROWSER_FOR_TESTS",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder, browser(program) as page:
        pages = record(Path(folder))
        page.resize(1100, 900)
        page.open(pages.show)
        page.screenshot(PICTURES / "show-page.png")
        page.screenshot(
            PICTURES / "show-timeline.png", "#timeline", before=heading(page, "timeline")
        )
        page.screenshot(PICTURES / "show-module-by-step.png", "#heat", before=heading(page, "heat"))
        page.screenshot(
            PICTURES / "show-spread.png", "#over-steps", before=heading(page, "over-steps")
        )
        page.screenshot(
            PICTURES / "show-magnitudes.png",
            "#histogram-modules",
            before=heading(page, "histogram-modules"),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
