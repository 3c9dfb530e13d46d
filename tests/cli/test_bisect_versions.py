"""`otel-torch bisect` between two versions: the function that makes the difference, proven."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from otel_torch.cli.main import main
from tests.corpora.versions.tiny_environments import make_environment
from tests.interpreters import fork_programs_of
from tests.support import run_command

OLD = dedent("""\
    import torch
    from torch import nn

    EPS = 1e-6

    def _scale(x):
        return x * 0.5

    def mix(x, y):
        return torch.tanh(x) + _scale(y)

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(norm(mix(self.a(x), x)))
    """)
# one function changed for worse, two others without effect
NEW = (
    OLD.replace(
        "    return torch.tanh(x) + _scale(y)", "    # no scale\n    return torch.tanh(x) + y"
    )
    .replace("def _scale(x):\n    return x * 0.5\n\n", "")
    .replace("    return x / (", "    y = x\n    return y / (")
    .replace("        return self.b(norm", "        h = x\n        return self.b(norm")
)
PROGRAM = dedent("""\
    import sys, torch, tinynet
    torch.manual_seed(0)
    tinynet.Net()(torch.randn(2, 8))
    """)


def install(folder: Path, version: str, source: str) -> Path:
    """Make a folder with a package, as pip would; return it."""
    information = folder / f"tinynet-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tinynet\nVersion: {version}\n"
    )
    (information / "top_level.txt").write_text("tinynet\n")
    (folder / "tinynet").mkdir()
    (folder / "tinynet" / "__init__.py").write_text(source)
    return folder


def environments(
    folder: Path, version: str, source: str, old_source: str = OLD, fresh: bool = False
) -> tuple[str, str]:
    """Write the program, and make an old and a new environment; return their interpreters."""
    (folder / "train.py").write_text(PROGRAM)
    old = install(folder / "old", "1.0", old_source)
    new = install(folder / "new", version, source)
    pythons = []
    for name, package in (("venv-old", old), ("venv-new", new)):
        python = make_environment(folder / name, [package])
        if not fresh:
            fork_programs_of(python, [package])
        pythons.append(str(python))
    return pythons[0], pythons[1]


def bisect(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_command("bisect", *words, cwd=folder)


def test_the_function_is_named_with_its_patch_and_proven(tmp_path: Path) -> None:
    old, new = environments(tmp_path, "2.0", NEW, fresh=True)
    installed = [tmp_path / side / "tinynet" / "__init__.py" for side in ("old", "new")]
    sources = [path.read_text() for path in installed]
    done = bisect(
        tmp_path, "--python-a", old, "--python-b", new, "--json", "answer.json", "--", "train.py"
    )
    assert done.returncode == 1, done.stderr
    assert "tinynet 1.0 → 2.0" in done.stdout
    assert "✗ proven: function tinynet.mix of tinynet, 1.0 → 2.0" in done.stdout
    assert "  -    return torch.tanh(x) + _scale(y)" in done.stdout
    assert "with it alone taken back, the new version computes what the old one" in done.stdout
    assert "otel_torch: trying tinynet.mix" in done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    (change,) = answer["changes"]
    assert (change["name"], change["unit"], change["proof"]) == (
        "tinynet.mix",
        "function",
        "proven",
    )
    assert change["reference"] == {"file": "old/tinynet/__init__.py", "line": 9}
    assert change["port"] == {"file": "new/tinynet/__init__.py", "line": 6}
    assert "@@ -9,2 +6,3 @@" in change["patch"]
    assert answer["suspects"] == [{"name": "tinynet", "versions": ["1.0", "2.0"]}]
    assert answer["verdict"] == "diverged" and answer["healed"] and answer["candidates"] == 3
    assert len(answer["runs"]) == 3
    assert [path.read_text() for path in installed] == sources
    assert not (tmp_path / "otel-torch" / "bisect").exists()


def test_other_sources_of_one_version_are_found(tmp_path: Path) -> None:
    old, new = environments(tmp_path, "1.0", OLD.replace("1e-6", "1e-1"))
    done = bisect(tmp_path, "--python-a", old, "--python-b", new, "--", "python", "train.py")
    assert done.returncode == 1, done.stderr
    assert "tinynet 1.0, with other sources" in done.stdout
    assert "✗ proven: value tinynet.EPS of tinynet" in done.stdout


def test_versions_that_compute_the_same_are_a_match(tmp_path: Path) -> None:
    same = NEW.replace("torch.tanh(x) + y", "torch.tanh(x) + 0.5 * y")
    old, new = environments(tmp_path, "2.0", same)
    done = bisect(tmp_path, "--python-a", old, "--python-b", new, "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("match: both versions compute the same")
    assert "2 runs" in done.stdout


def test_a_new_version_that_fails_is_healed(tmp_path: Path) -> None:
    broken = OLD.replace("return x / (", "raise ValueError('no norm')\n    return x / (")
    old, new = environments(tmp_path, "2.0", broken)
    done = bisect(tmp_path, "--python-a", old, "--python-b", new, "--", "train.py")
    assert done.returncode == 1, done.stderr
    assert "The new version fails" in done.stdout and "no norm" in done.stdout
    assert "✗ proven: function tinynet.norm" in done.stdout


def test_what_comes_after_the_last_forward_differs(tmp_path: Path) -> None:
    last = "\ndef step(x, number):\n    return x * 2 if number else x\n"
    old, new = environments(
        tmp_path, "2.0", OLD + last.replace("x * 2", "(x * 2).log()"), OLD + last
    )
    (tmp_path / "train.py").write_text(
        "import torch, tinynet\ntorch.manual_seed(0)\nnet, x = tinynet.Net(), torch.randn(2, 8)\n"
        "for number in range(2):\n    x = tinynet.step(net(x), number)\n"
    )
    done = bisect(tmp_path, "--python-a", old, "--python-b", new, "--", "train.py")
    assert done.returncode == 1, done.stderr
    assert "all forwards match, recording step 1" in done.stderr
    assert "✗ proven: function tinynet.step" in done.stdout


def test_the_setting_that_makes_the_difference(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\ntorch.manual_seed(0)\n"
        "x = torch.randn(2, 8) * float(os.environ['GAIN'])\ntorch.nn.Linear(8, 8)(x)\n"
    )
    done = bisect(
        tmp_path,
        "--setting",
        "torch.set_num_threads=1,2",
        "--setting",
        "GAIN=1,2",
        "--",
        "train.py",
    )
    assert done.returncode == 1, done.stderr
    assert "✗ proven: setting GAIN, 1 → 2" in done.stdout
    assert "set_num_threads, 1" not in done.stdout


def test_two_commits_of_ones_own_repository(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout

    git("init", "--quiet")
    (tmp_path / "tinynet.py").write_text(OLD)
    (tmp_path / "train.py").write_text(PROGRAM)
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (tmp_path / "tinynet.py").write_text(NEW)
    git("commit", "--quiet", "--all", "-m", "mix without scale")
    (tmp_path / "train.py").write_text(PROGRAM + "# the end\n")
    git("commit", "--quiet", "--all", "-m", "a remark")
    done = bisect(tmp_path, "--commit-a", "HEAD~2", "--commit-b", "HEAD", "--", "train.py")
    assert done.returncode == 1, done.stderr
    assert "✗ proven: function tinynet.mix" in done.stdout
    commits = [line for line in done.stdout.splitlines() if line.startswith("  commits ")]
    assert len(commits) == 1 and "mix without scale" in commits[0]
    assert git("worktree", "list").count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--python-a", sys.executable, "--", "train.py"], "--python-a and --python-b belong together"),
        (["--setting", "gain=1,2", "--", "train.py"], "is no setting: write NAME=A,B"),
        (["--setting", "GAIN=1,2"], "one command is needed"),
        (["--setting", "GAIN=1,2", "--", "a.py", "--", "b.py"], "one command is needed"),
        (["--setting", "GAIN=1,2", "--html", "a.html", "--", "a.py"], "--html compares two commands"),
        (["--repo", ".", "--", "a.py"], "--repo belongs to"),
        (["--python-a", "no-python", "--python-b", "no-python", "--", "a.py"], "no-python: no such command"),
        (["--python-a", "true", "--python-b", "true", "--", "a.py"], "true cannot be listed"),
        (["--commit-a", "x", "--commit-b", "y", "--", "a.py"], "git in"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", os.fspath(tmp_path.parent))
    assert main(["bisect", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
