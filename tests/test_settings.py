"""Bad settings give one clear line, and the program keeps its result and exit status.

Unmodified programs in child processes, switched on by environment variables, two at a time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from otel_torch.recording.reader import load_recording
from tests.support import PROGRAMS, lines, metadata, run_python

# prints its result and ends with a status of its own: neither may change
PROGRAM = (PROGRAMS / "exit_with_status_3.py").read_text()
RESULT, STATUS = "296.0\n", 3


@dataclass
class Case:
    """A program, and the variables to set for it; `{folder}` in a value is the folder it runs in."""

    environ: dict[str, str]
    program: str = PROGRAM
    result: str = RESULT
    status: int = STATUS


@dataclass
class Ended:
    folder: Path
    stdout: str
    stderr: str
    status: int

    @property
    def reported(self) -> list[str]:
        """The lines on stderr, without the count at the end."""
        ours = [line for line in self.stderr.splitlines() if line.startswith("otel_torch")]
        return [line for line in ours if " records in " not in line]

    @property
    def recording(self) -> Path:
        return self.folder / "run.jsonl"


# selections without a usable entry: the line must have these words, and nothing is
# recorded
UNUSABLE = {
    "no regex": (
        {"OTEL_TORCH_MODULES": "("},
        ["OTEL_TORCH_MODULES='('", "not a regular expression"],
    ),
    "only an unknown statistic": (
        {"OTEL_TORCH_STATS": "bogus"},
        ["OTEL_TORCH_STATS", "'bogus'", "abs_mean"],
    ),
    "no step list": ({"OTEL_TORCH_STEPS": "first"}, ["OTEL_TORCH_STEPS", "'first'", "10-20"]),
}
# places where no file can be: the line must hold these words, and what is there stays as it is
NO_PLACE = {
    "a folder": ("{folder}", ["Is a directory", "OTEL_TORCH_JSONL"]),
    "under a file": ("{folder}/program.py/run.jsonl", ["Not a directory", "OTEL_TORCH_JSONL"]),
}

LARGE = (PROGRAMS / "ten_thousand_modules.py").read_text()
RAISES = (PROGRAMS / "raise_in_the_second_forward.py").read_text()
DELETED = (PROGRAMS / "delete_models.py").read_text()
LIMITED_FILES = (
    "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n" + PROGRAM
)

CASES = {
    "entries": Case(
        {"OTEL_TORCH_STATS": "mean,bogus", "OTEL_TORCH_STEPS": "0,x,2", "OTEL_TORCH_ACTIVATIONS": "perhaps",
         "OTEL_TORCH_MAX_BYTES": "lots", "OTEL_TORCH_JSONL_RANKS": "0,second", "OTEL_TORCH_CAPTURE": "outputs,thoughts",
         "OTEL_TORCH_METRIC_SERIES": "-1", "OTEL_TORCH_MODUELS": "^0$"}
    ),
    **{name: Case(environ) for name, (environ, _) in UNUSABLE.items()},
    **{name: Case({"OTEL_TORCH_JSONL": path}) for name, (path, _) in NO_PLACE.items()},
    "full disk": Case({}, LIMITED_FILES),
    "limit": Case({"OTEL_TORCH_MAX_BYTES": "2KB"}),
    "large": Case({"OTEL_TORCH_STATS": "mean"}, LARGE, "2.0\n", 0),
    "raises": Case({}, RAISES, "8.0\nmine True\n8.0\n8.0\n", 0),
    "deleted": Case({}, DELETED, "2.0\n2.0\n2.0\n", 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    running: dict[str, Future[Ended]] = {}
    pool = ThreadPoolExecutor(2)

    def execute(case: Case) -> Ended:
        folder = tmp_path_factory.mktemp("case")
        environ = {name: value.format(folder=folder) for name, value in case.environ.items()}
        done = run_python(
            folder, textwrap.dedent(case.program), check=False, timeout=120, **environ
        )
        return Ended(folder, done.stdout, done.stderr, done.returncode)

    def result(name: str) -> Ended:
        if not running:
            running.update({each: pool.submit(execute, case) for each, case in CASES.items()})
        return running[name].result()

    return result


@pytest.mark.parametrize("name", CASES)
def test_the_programs_result_and_exit_status_are_its_own(
    name: str, ended: Callable[[str], Ended]
) -> None:
    end = ended(name)
    assert (end.stdout, end.status) == (CASES[name].result, CASES[name].status), end.stderr
    assert "Traceback" not in end.stderr


def test_a_bad_entry_is_named_and_left_out_and_a_bad_value_means_the_default(
    ended: Callable[[str], Ended],
) -> None:
    end = ended("entries")
    expected = {
        "OTEL_TORCH_STATS": "'bogus'", "OTEL_TORCH_STEPS": "'x'", "OTEL_TORCH_ACTIVATIONS": "'perhaps'",
        "OTEL_TORCH_MAX_BYTES": "'lots'", "OTEL_TORCH_JSONL_RANKS": "'second'", "OTEL_TORCH_CAPTURE": "'thoughts'",
        "OTEL_TORCH_METRIC_SERIES": "'-1'", "OTEL_TORCH_MODUELS": "did you mean OTEL_TORCH_MODULES?",
    }  # fmt: skip
    assert len(end.reported) == len(expected)
    for variable, value in expected.items():
        (line,) = [line for line in end.reported if variable in line]
        assert value in line and ("use" in line or "mean" in line)
    rows = lines(end.recording)
    assert {row["step"] for row in rows} == {0, 2}
    assert all(list(row)[-1] == "mean" for row in rows)


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_selection_without_anything_usable_records_nothing(
    name: str, ended: Callable[[str], Ended]
) -> None:
    end = ended(name)
    reported = " ".join(end.reported)
    assert (
        all(word in reported for word in UNUSABLE[name][1])
        and "Nothing is recorded" in end.reported[-1]
    )
    assert [path.name for path in end.folder.iterdir()] == ["program.py"]


@pytest.mark.parametrize("name", NO_PLACE)
def test_a_place_where_no_file_can_be_is_one_line(name: str, ended: Callable[[str], Ended]) -> None:
    end = ended(name)
    line, lost = end.reported
    assert all(word in line for word in NO_PLACE[name][1])
    assert lost == "otel_torch: lost: 30 records (disk)"
    assert [path.name for path in end.folder.iterdir()] == ["program.py"]
    assert (end.folder / "program.py").read_text() == PROGRAM


def test_a_full_disk_ends_the_recording_after_a_whole_step(ended: Callable[[str], Ended]) -> None:
    end = ended("full disk")
    line, lost = end.reported
    assert str(end.recording) in line and "the program continues" in line
    rows = lines(end.recording)
    count = len(rows)
    assert 0 < count < 30 and count % 3 == 0
    assert end.recording.read_bytes().endswith(b"}\n")
    meta = metadata(end.recording)
    assert (meta["writing_ended"], meta["records_written"]) == ("disk", count)
    assert meta["lost"] == [{"what": "record", "reason": "disk", "count": 30 - count}]
    assert lost == f"otel_torch: lost: {30 - count} records (disk)"


def test_the_limit_of_bytes_ends_the_recording_after_a_whole_step(
    ended: Callable[[str], Ended],
) -> None:
    end = ended("limit")
    line, lost = end.reported
    assert "OTEL_TORCH_MAX_BYTES (2000 bytes)" in line
    count = len(lines(end.recording))
    assert 0 < count < 30 and count % 3 == 0
    assert 2000 <= end.recording.stat().st_size < 4000
    meta = metadata(end.recording)
    assert (meta["writing_ended"], meta["records_written"]) == ("max_bytes", count)
    assert meta["lost"] == [{"what": "record", "reason": "max_bytes", "count": 30 - count}]
    assert lost == f"otel_torch: lost: {30 - count} records (max_bytes)"


def test_a_model_of_ten_thousand_modules_is_recorded_whole(ended: Callable[[str], Ended]) -> None:
    end = ended("large")
    assert end.reported == []
    rows = load_recording(end.recording).rows
    assert len(rows) == len({(row["step"], row["module"]) for row in rows}) == 20_000


def test_a_model_that_raises_is_recorded_up_to_there_and_from_there_on(
    ended: Callable[[str], Ended],
) -> None:
    end = ended("raises")
    assert end.reported == []
    rows = [(row["step"], row["call"], row["module"]) for row in lines(end.recording)]
    whole = ["0", "1.0", "1", "2", ""]
    # the second forward raises after its first module; it is not completed, so the third is the
    # same step's next call
    raised, again = [(1, 0, "0")], [(1, int(module == "0"), module) for module in whole]
    assert rows == [(0, 0, module) for module in whole] + raised + again + [
        (2, 0, module) for module in whole
    ]


def test_a_module_that_is_deleted_while_it_is_hooked_is_gone(ended: Callable[[str], Ended]) -> None:
    end = ended("deleted")
    assert end.reported == []
    rows = [(row["model"], row["step"], row["module"]) for row in lines(end.recording)]
    assert rows[:4] == [("Sequential", 0, module) for module in ("0", "1", "2", "")]
    assert [(model, step) for model, step, _ in rows[4:7]] == [("Sequential", 1)] * 3
    assert rows[7:] == [("Sequential#2", 0, "0"), ("Sequential#2", 0, "")]
