"""The answer as text: what could not be exchanged takes few lines where it does not matter."""

from __future__ import annotations

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.versions.version_answer import VersionBisection
from otel_torch.bisecting.versions.version_text import render_version_bisection
from otel_torch.parity.finding import Report


@pytest.mark.parametrize(("is_healed", "listed"), [(True, "has (20)"), (False, "m7.py, 12 more)")])
def test_what_could_not_be_exchanged_is_counted_or_named(is_healed: bool, listed: str) -> None:
    bisection = Bisection(Report("diverged", reference="", port=""), is_healed=is_healed)
    answer = VersionBisection(bisection, [], [])
    answer.excluded["modules of tinynet that only the old version has"] = [
        f"m{number}.py" for number in range(20)
    ]
    text = " ".join(render_version_bisection(answer, color=False).split())
    assert "Not exchanged: modules of tinynet that only the old version" in text
    assert listed in text
    assert ("m0.py" in text) is not is_healed
