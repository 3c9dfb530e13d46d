"""`otel-torch skill`: short, and true of the commands, options, settings and keys that exist."""

from __future__ import annotations

import argparse
import dataclasses
import re
from importlib.resources import files

import pytest

from otel_torch.bisecting.bisection import Bisection
from otel_torch.cli.main import COMMANDS, main, make_parser
from otel_torch.parity.finding import CodeLine, Finding, Report
from otel_torch.rendering.next_step import NextStep
from otel_torch.settings import Settings

TEXT = files("otel_torch").joinpath("SKILL.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def options_of(command: str) -> set[str]:
    (subparsers,) = (
        action
        for action in make_parser(command)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return set(subparsers.choices[command]._option_string_actions)


def test_it_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skill"]) == 0
    assert capsys.readouterr().out == TEXT
    assert len(TEXT.splitlines()) <= 150
    assert TEXT.startswith("---\nname: otel-torch\ndescription: ")


def test_what_it_names_exists() -> None:
    named = set(re.findall(r"otel-torch ([a-z]+)", TEXT))
    assert named <= set(COMMANDS) and len(named) > 5
    assert set(re.findall(r"\bOTEL_TORCH_[A-Z_]+\b", TEXT)) <= set(Settings.names())


@pytest.mark.parametrize("command", ["diff", "show", "doctor"])
def test_each_option_of_a_command_exists(command: str) -> None:
    used = re.findall(rf"`?otel-torch {command}\b([^`\n]*)", TEXT)
    options = {option for words in used for option in re.findall(r"--[a-z-]+", words)}
    assert options and options <= options_of(command)


def test_each_option_of_bisect_exists() -> None:
    options = set(re.findall(r"--[a-z][a-z-]*", section("bisect")))
    assert options and options <= options_of("bisect")


def test_each_key_of_the_answer_exists() -> None:
    report = Report("match")
    names = {
        *(field.name for kind in (Finding, CodeLine) for field in dataclasses.fields(kind)),
        *report.as_json(),
        *Bisection(report).as_json(),
    }
    keys = {
        key
        for line in section("How to read the answer").splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert len(keys) > 15 and keys - names == {"bisect", "diff"}  # which print them
    step = NextStep(["a"], "b", "c", {"d": "e"}).as_json()
    assert all(f'"{key}"' in section("next") for key in step)
