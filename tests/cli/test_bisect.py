"""`otel-torch bisect` as a command: two programs in, the lines at fault out."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from textwrap import dedent

import pytest

from otel_torch.bisecting.runs import EndedEarly
from otel_torch.cli.bisect_runs import ends_early
from otel_torch.cli.main import main
from tests.interpreters import command_of_tests
from tests.support import clean_environment, run_command

PROGRAM = dedent("""\
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            h = torch.relu(self.up(x))
            return self.down(h) + x

    torch.manual_seed(0)
    with torch.no_grad(), open("runs", "a") as runs:
        Net()(torch.randn(4, 8))
        runs.write("x")
""")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reference.py").write_text(PROGRAM)
    wrong = PROGRAM.replace("torch.relu", "torch.tanh").replace("+ x", "- x")
    (tmp_path / "port.py").write_text(wrong)
    return tmp_path


def bisect(folder: Path, *options: str, port: str = "port.py") -> subprocess.CompletedProcess[str]:
    python = command_of_tests("python")
    words = [*options, "--", python, "reference.py", "--", python, port]
    return run_command("bisect", *words, cwd=folder)


def test_two_faults_in_one_command(folder: Path) -> None:
    done = bisect(
        folder, "--json", "answer.json", "--html", "answer.html",
        "--junit", "junit.xml", "--sarif", "answer.sarif",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "✗ proven (1 of 2): The reference computes `relu` where the port computes `tanh`." in (
        done.stdout
    )
    assert "✗ proven (2 of 2): The reference computes `add` where the port computes `sub`." in (
        done.stdout
    )
    assert "port  port.py:10" in done.stdout and "port  port.py:11" in done.stdout
    assert done.stdout.rstrip().endswith("the whole port matches")
    assert "\nerror by depth: " in done.stdout
    assert re.search(r"there, all \d+ pairs are within their floor\n", done.stdout)
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["verdict"] == "diverged" and answer["healed"]
    assert [fault["port_line"]["line"] for fault in answer["faults"]] == [10, 11]
    assert len(answer["runs"]) == 5
    page = (folder / "answer.html").read_text()
    assert "port.py:10" in page and "port.py:11" in page
    assert "Error by depth, as the port is" in page
    assert "Error by depth, with all that was healed" in page
    (step,) = answer["next"]
    assert step["why"].startswith("mend the lines of the port")
    python = command_of_tests("python")
    assert step["command"] == [
        "otel-torch", "bisect", "--", python, "reference.py", "--", python, "port.py"
    ]  # fmt: skip
    assert f"\n  otel-torch bisect -- {python} reference.py -- " in done.stdout
    (run,) = json.loads((folder / "answer.sarif").read_text())["runs"]
    lines = [
        result["locations"][0]["physicalLocation"]["region"]["startLine"]
        for result in run["results"]
    ]
    assert lines == [10, 11] and run["tool"]["driver"]["name"] == "otel-torch bisect"
    assert (folder / "junit.xml").read_text().count("<failure") == 2
    assert not (folder / "otel-torch" / "bisect").exists()


def test_a_match_and_what_an_earlier_call_has_run(folder: Path) -> None:
    first = bisect(folder, "--keep", port="reference.py")
    assert first.returncode == 0, first.stderr
    assert "✓ The port matches the reference" in first.stdout
    again = bisect(folder, "--resume", "--json", "-", port="reference.py")
    answer = json.loads(again.stdout)
    assert (again.returncode, answer["verdict"], answer["next"]) == (0, "match", [])
    assert (folder / "runs").read_text() == "xx"  # twice in all


def test_a_folder_with_other_files_is_left_alone(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("keep")
    done = bisect(folder, "--out", "mine")
    assert done.returncode == 2
    assert done.stderr == (
        "otel_torch: mine holds notes.txt, which is no run: choose another with --out\n"
    )
    assert (folder / "mine" / "notes.txt").read_text() == "keep"


def test_two_calls_do_not_run_in_one_folder(folder: Path) -> None:
    (folder / "mine").mkdir()
    with (folder / "mine" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = bisect(folder, "--out", "mine")
    assert done.returncode == 2
    assert done.stderr == (
        "otel_torch: another bisect is running in mine: choose another folder with --out\n"
    )


def test_a_port_that_fails_is_one_line(folder: Path) -> None:
    (folder / "port.py").write_text("raise SystemExit('no weights')")
    done = bisect(folder)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(
        r"otel_torch: incomparable: \S+ port.py ended with 1: no weights \(all of it: "
        r"\S+output.txt\)\n",
        done.stderr,
    )


# what the port does in its second trial, once
IN_THE_SECOND_TRIAL = """
import os, pathlib, time
if os.environ.get("OTEL_TORCH_GRAPH_PUT", "").endswith("put-2") and not os.path.exists("there"):
    pathlib.Path("there").touch()
    {}
"""


@pytest.fixture
def stalls(folder: Path) -> Path:
    """The folder of a port that waits in its second trial, once."""
    wrong = (folder / "port.py").read_text()
    (folder / "port.py").write_text(wrong + IN_THE_SECOND_TRIAL.format("time.sleep(100)"))
    return folder


def interrupt(folder: Path, number: signal.Signals, *options: str) -> tuple[str, str]:
    """Interrupt a search while its port waits; return what it prints."""
    python = command_of_tests("python")
    words = [*options, "--", python, "reference.py", "--", python, "port.py"]
    process = subprocess.Popen(
        [command_of_tests("otel-torch"), "bisect", *words],
        env=clean_environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (folder / "there").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    return out, err


def test_an_interrupted_search_says_what_it_knows_and_goes_on_later(stalls: Path) -> None:
    out, err = interrupt(stalls, signal.SIGTERM, "--json", "-")
    answer = json.loads(out)
    assert answer["ended_early"] == "the search was ended by SIGTERM" and not answer["healed"]
    assert [fault["port_line"]["line"] for fault in answer["faults"]] == [10]
    assert [fault["proof"] for fault in answer["faults"]] == ["proven"]
    assert answer["warnings"] == ["more may be wrong: the search was ended by SIGTERM"]
    assert "; --resume goes on from what " in err
    ran = (stalls / "runs").read_text()
    again = json.loads(bisect(stalls, "--resume", "--json", "-").stdout)
    assert [fault["port_line"]["line"] for fault in again["faults"]] == [10, 11]
    assert again["healed"] and again["ended_early"] is None
    assert (stalls / "runs").read_text() == ran + "x"  # but for what was interrupted


def test_what_was_not_tried_yet_is_said_to_be(stalls: Path) -> None:
    port = (stalls / "port.py").read_text()
    (stalls / "port.py").write_text(port.replace("put-2", "put-1"))
    out, _ = interrupt(stalls, signal.SIGINT)
    assert "? not tried: The reference computes `relu` where the port computes `tanh`." in out
    assert "Next: check the lines of the port, and run this again" in out
    assert "the search ended before it was tried" in out
    assert "more may be wrong: the search was ended by SIGINT" in " ".join(out.split())


def test_a_trial_that_fails_costs_no_answer(folder: Path) -> None:
    wrong = (folder / "port.py").read_text()
    raises = IN_THE_SECOND_TRIAL.format("raise SystemExit('no memory')")
    (folder / "port.py").write_text(wrong + raises)
    done = bisect(folder)
    assert done.returncode == 1, done.stderr
    assert "✗ proven: The reference computes `relu` where the port computes `tanh`." in done.stdout
    assert "port.py ended with 1: no memory" in " ".join(done.stdout.split())


def test_the_time_of_a_search_is_over_once() -> None:
    with pytest.raises(EndedEarly, match=r"did not end within 0\.05 s"), ends_early(0.05) as came:
        while True:
            time.sleep(0.01)
    assert came == [] and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    with ends_early(None):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "python", "a.py"], "two commands are needed"),
        (["--", "a", "--", "b", "--", "c"], "goes into sh -c"),
        (["--", "python3", "x", "--", "port.py"], "did you mean: python port.py"),
        (["--module", "(", "--", "a", "--", "b"], "is no regular expression"),
        (["--tolerance", "0", "--", "a", "--", "b"], "is not a relative error"),
    ],
    ids=str,
)
def test_wrong_usage_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", *words]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1


RANKS = dedent("""\
    import os, sys, torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = torch.relu(self.first(x))
            dist.all_reduce(h)
            return self.last(h * SCALE)

    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        net(torch.randn(4, 8))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
""")


def test_ranks_are_compared_with_the_same_ranks(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(RANKS.replace("SCALE", "0.5"))
    (tmp_path / "port.py").write_text(RANKS.replace("SCALE", "1.0"))
    launch = [command_of_tests("python"), "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node=2"]
    words = ["--json", "-", "--", *launch, "reference.py", "--", *launch, "port.py"]
    done = run_command("bisect", *words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["healed"] and [fault["proof"] for fault in answer["faults"]] == ["proven"]
    assert answer["faults"][0]["port_line"]["text"].strip() == "return self.last(h * 1.0)"
    assert all(len(run["recordings"]) == 2 for run in answer["runs"])
