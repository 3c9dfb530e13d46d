"""Cases of long corpora are drawn by the day, and each of them is drawn before long."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path

import pytest

from tests.sampling import OF_FILES, drawn_files, sample, seed_of_this_run

CASES = [f"{family} {number}" for family in "abc" for number in range(9)]


def test_each_case_is_drawn_once_in_as_many_days_as_the_share_says() -> None:
    drawn = Counter(case for day in range(739_000, 739_004) for case in sample(CASES, 4, str(day)))
    assert drawn == dict.fromkeys(CASES, 1)


def test_every_day_draws_some_of_each_family_in_the_order_of_the_table() -> None:
    for day in range(4):
        drawn = sample(CASES, 4, str(day))
        assert {case[0] for case in drawn} == {"a", "b", "c"}
        assert drawn == sorted(drawn, key=CASES.index)


def test_all_is_every_case() -> None:
    assert sample(CASES, 4, "all") == CASES


def test_the_seed_is_the_day_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAMPLE_SEED", raising=False)
    assert seed_of_this_run() == str(datetime.date.today().toordinal())
    monkeypatch.setenv("SAMPLE_SEED", "8")
    assert sample(CASES, 3) == sample(CASES, 3, "8") != sample(CASES, 3, "9")


def test_files_are_named_themselves_and_folders_are_drawn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {str(tmp_path / f"test_{number}.py") for number in range(5)}
    for name in names:
        Path(name).touch()
    drawn = Counter[str]()
    for day in range(OF_FILES):
        monkeypatch.setenv("SAMPLE_SEED", str(day))
        drawn.update(map(str, drawn_files([__file__, str(tmp_path)])))
    assert drawn == {__file__: OF_FILES} | dict.fromkeys(names, 1)
