"""`otel-torch diff` as a user starts it: exit status, output, and one clear line for unusable
input.

Real processes and real recordings. Unusable input must end neither in a traceback nor in a match.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from otel_torch.parity.diff import diff
from tests.support import progress_in_terminal, recording_to, run_command

KEYS = [
    "schema",
    "verdict",
    "reason",
    "pairs",
    "first",
    "introduced",
    "harmless",
    "unpaired",
    "ambiguous",
    "warnings",
    "environment",
    "next",
]


command = partial(run_command, "diff")


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.stem(x).mean((-1, -2)))


def record(path, model, *shape, **settings):
    torch.manual_seed(1)
    with recording_to(path, **{"signals": "spans"} | settings):
        for _ in range(3):
            model(torch.randn(*shape))
    return path


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    torch.manual_seed(0)
    model, vision = Transformer(), Vision()
    paths = {
        "reference": record(folder / "reference.jsonl", model, 2, 4),
        "again": record(folder / "again.jsonl", model, 2, 4),
    }
    with torch.no_grad():
        model.blocks[1][1].weight[0] *= 1.5
    paths["wrong"] = record(folder / "wrong.jsonl", model, 2, 4)
    paths["vision"] = record(folder / "vision.jsonl", vision, 2, 3, 8, 8)
    return paths


# -- what it says, and where


@pytest.mark.parametrize(
    "port, status, verdict",
    [("again", 0, "match"), ("wrong", 1, "diverged"), ("vision", 2, "incomparable")],
)
def test_exit_status_and_one_object(recordings, port, status, verdict):
    done = command(recordings["reference"], recordings[port], "--json", "-")
    assert done.returncode == status
    document = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and list(document) == KEYS
    assert (document["schema"], document["verdict"]) == ("otel_torch.diff/1", verdict)
    assert (document["first"] is not None) == (verdict == "diverged") and (
        document["reason"] is not None
    ) == (status == 2)
    lines = done.stderr.splitlines()
    assert len(lines) == (status == 2) and all(
        line.startswith("otel_torch: incomparable: ") for line in lines
    )


def test_without_options_a_screen_and_nothing_else(recordings):
    done = command(recordings["reference"], recordings["wrong"])
    assert (done.returncode, done.stderr) == (1, "")
    assert "blocks.1.1" in done.stdout and "\x1b" not in done.stdout


def test_files_are_written_beside_the_screen(recordings, tmp_path):
    done = command(
        recordings["reference"],
        recordings["wrong"],
        "--json",
        "d.json",
        "--html",
        "d.html",
        "--all",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "blocks.1.1" in done.stdout
    assert len(json.loads((tmp_path / "d.json").read_text())["compared"]) > 10
    assert "blocks.1.1" in (tmp_path / "d.html").read_text()


def test_a_reader_that_has_seen_enough_does_not_change_the_status(recordings):
    line = f'"{sys.executable}" -m otel_torch diff "{recordings["reference"]}" "{recordings["wrong"]}" --all'
    done = subprocess.run(
        ["bash", "-c", f"{line} | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_how_far_it_is_stands_in_a_terminal_only(recordings):
    """At the end the progress line is erased: only the report stays."""
    words = str(recordings["reference"]), str(recordings["again"]), "--json", "-"
    out, shown = progress_in_terminal("diff", *words)
    assert "\x1b" not in out and json.loads(out)["verdict"] == "match"
    assert shown.endswith("\r\x1b[K") and "\n" not in shown and len(shown) > 5
    assert command(*words).stderr == ""


def test_as_a_function(recordings):
    messages = []
    report = diff(recordings["reference"], recordings["wrong"], progress=messages.append)
    assert (
        report.verdict == "diverged"
        and report.first is not None
        and report.first.module == "blocks.1.1"
    )
    assert messages
    with pytest.raises(ValueError, match="holds no record"):
        diff(recordings["reference"], os.devnull)


# -- what a person probably did not mean


def test_the_same_file_twice_is_a_match_and_said(recordings, tmp_path):
    alias = tmp_path / "link.jsonl"
    alias.symlink_to(recordings["reference"])
    for port in (recordings["reference"], alias):
        done = command(recordings["reference"], port, "--json", "-")
        assert done.returncode == 0
        assert "are the same file" in json.loads(done.stdout)["warnings"][0]


def test_noise_that_is_none_is_said(recordings):
    itself = diff(recordings["reference"], recordings["again"], noise=recordings["reference"])
    assert "is the reference itself" in itself.warnings[0]
    quiet = diff(recordings["reference"], recordings["again"], noise=recordings["again"])
    assert "was recorded without OTEL_TORCH_NOISE" in quiet.warnings[0]


def test_exchanged_files_are_said(recordings, tmp_path):
    """Only a port has the mapping by which it loads the reference's weights."""
    port = tmp_path / "port.jsonl"
    port.write_bytes(recordings["again"].read_bytes())
    meta = json.loads(recordings["again"].with_name("again.meta.json").read_text())
    meta["models"]["Transformer"]["param_names_mapping"] = [["^never$", "never"]]
    (tmp_path / "port.meta.json").write_text(json.dumps(meta))
    assert "are the two arguments swapped?" in diff(port, recordings["reference"]).warnings[0]
    assert diff(recordings["reference"], port).warnings == []


# -- bad input


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_no_recording_is_one_line(recordings, tmp_path, place):
    files = [recordings["reference"], recordings["again"]]
    files[place] = tmp_path / "empty.jsonl"
    files[place].touch()
    plain, answered = command(*files), command(*files, "--json", "-")
    assert (plain.returncode, plain.stdout, plain.stderr) == (2, "", answered.stderr)
    (line,) = plain.stderr.splitlines()
    assert line.startswith("otel_torch: ") and f"{files[place]}: is empty" in line
    # who reads a program's answer finds one here too
    document = json.loads(answered.stdout)
    assert document["verdict"] == "incomparable" and document["reason"] in line


@pytest.mark.parametrize("option", ["--noise", "--map"])
def test_what_options_name_must_be_there(recordings, tmp_path, option):
    done = command(recordings["reference"], recordings["again"], option, tmp_path / "missing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"otel_torch: {tmp_path}/missing: No such file or directory\n"


@pytest.mark.parametrize(
    "option, place, expected",
    [
        ("--json", "", "Is a directory"),
        *(
            (option, "no/such/out", "No such file or directory")
            for option in (
                "--json",
                "--html",
                "--junit",
                "--sarif",
                "--save-map",
                "--save-isolation",
            )
        ),
    ],
)
def test_where_nothing_can_be_written_is_one_line(recordings, tmp_path, option, place, expected):
    done = command(recordings["reference"], recordings["again"], option, f"{tmp_path}/{place}")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert str(tmp_path) in line and line.endswith(f"cannot be written: {expected}")


@pytest.mark.parametrize("value", ["tight", "0", "-1e-3", "nan", "inf"])
def test_a_tolerance_that_is_none(recordings, value):
    done = command(recordings["reference"], recordings["again"], f"--rtol={value}")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "--rtol" in line and repr(value) in line and "1e-4" in line


def test_a_tolerance_that_lets_everything_pass(recordings):
    assert command(recordings["reference"], recordings["wrong"], "--rtol", "10").returncode == 0


def test_an_old_answer_does_not_stay(recordings, tmp_path):
    """Yesterday's file with `match` would be taken for today's answer."""
    answer = tmp_path / "answer.json"
    assert command(recordings["reference"], recordings["again"], "--json", answer).returncode == 0
    assert (
        command(recordings["reference"], tmp_path / "missing.jsonl", "--json", answer).returncode
        == 2
    )
    assert json.loads(answer.read_text())["verdict"] == "incomparable"


def test_no_common_module_says_what_there_is(recordings):
    done = command(recordings["reference"], recordings["vision"])
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "Transformer" in line and "Vision" in line
    assert "✓" not in done.stdout and not done.stdout.startswith("match")


# -- files for CI


@pytest.mark.parametrize(
    "port, status, results", [("again", 0, 0), ("wrong", 1, 1), ("vision", 2, 0), ("none", 2, 0)]
)
def test_files_for_ci_are_written_whatever_the_verdict(recordings, tmp_path, port, status, results):
    done = command(
        recordings["reference"], recordings.get(port, "none.jsonl"),
        "--junit", "junit.xml", "--sarif", "findings.sarif", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == status
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (int(suite.get("failures")), int(suite.get("errors"))) == (results, int(status == 2))
    (run,) = json.loads((tmp_path / "findings.sarif").read_text())["runs"]
    assert len(run["results"]) == results
    assert run["invocations"][0]["executionSuccessful"] == (status != 2)
