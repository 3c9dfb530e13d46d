"""One browser for all tests of pages; without one they are skipped, and say what is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pages.browser import NONE_FOUND, Page, browser, find
from tests.pages.recorded import Recorded, record


@pytest.fixture(scope="session")
def window() -> Iterator[Page]:
    """A browser's window, for tests that clean up after each other."""
    program = find()
    if program is None:
        pytest.skip(NONE_FOUND)
    with browser(program) as page:
        yield page


@pytest.fixture
def page(window: Page) -> Page:
    """The window, with nothing said in it so far."""
    window.errors.clear()
    window.requests.clear()
    window.resize(1280, 900)
    return window


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Pages of real runs, made by the commands."""
    return record(tmp_path_factory.mktemp("pages"))
