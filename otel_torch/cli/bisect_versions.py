"""`otel-torch bisect` between two versions: one program, two environments, commits or settings."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from otel_torch.bisecting.processes import CommandPrograms, Surroundings
from otel_torch.bisecting.versions.commits import CommitLog
from otel_torch.bisecting.versions.environments import Suspect, find_suspects, list_environment
from otel_torch.bisecting.versions.recording_links import link_what_a_recording_needs
from otel_torch.bisecting.versions.version_programs import SettingChange, VersionPrograms
from otel_torch.bisecting.versions.version_search import VersionSearch
from otel_torch.bisecting.versions.version_text import render_version_bisection
from otel_torch.cli.bisect_runs import (
    close_runs,
    ends_early,
    given_options,
    make_teller,
    print_answer,
    run_folder,
    run_options,
)
from otel_torch.cli.main import BadInput
from otel_torch.cli.run import find_program
from otel_torch.parity.sides import Sides
from otel_torch.rendering.next_step import NextStep
from otel_torch.rendering.progress import Progress
from otel_torch.rendering.writable import check_writable

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_SETTING = re.compile(r"(torch(?:\.\w+)+|[A-Z_][A-Z0-9_]*)=([^,]*),([^,]*)")
# options of two commands that say nothing of one program
_OF_TWO_COMMANDS = ("module", "html", "junit", "sarif", "resume", "within")


def add_version_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that compare two versions of what one program uses."""
    group = parser.add_argument_group(
        "which change did it",
        "One command, which runs with an old version A and a new version B: which function makes "
        "the difference?",
    )
    for side, name in (("a", "old"), ("b", "new")):
        group.add_argument(
            f"--python-{side}", metavar="PYTHON", help=f"interpreter of the {name} environment"
        )
    for side, name in (("a", "old"), ("b", "new")):
        group.add_argument(
            f"--commit-{side}", metavar="COMMIT", help=f"{name} commit of the program's repository"
        )
    group.add_argument(
        "--setting",
        metavar="NAME=A,B",
        action="append",
        default=[],
        type=_parse_setting,
        help="an environment variable, or a name in torch such as torch.set_num_threads=1,8; may "
        "be given several times",
    )
    group.add_argument(
        "--repo",
        metavar="FOLDER",
        type=Path,
        help="git checkout of the package, to list the commits that touch the change",
    )


def _parse_setting(text: str) -> SettingChange:
    match = _SETTING.fullmatch(text)
    if match is None:
        message = f"{text!r} is no setting: write NAME=A,B or torch.NAME=A,B"
        raise argparse.ArgumentTypeError(message)
    name, old, new = match.groups()
    return SettingChange(name, Sides(old, new))


def asks_for_versions(arguments: argparse.Namespace) -> bool:
    """Return whether one command runs with two versions.

    Raises:
        BadInput: One of two options is missing.
    """
    for name in ("python", "commit"):
        given = [getattr(arguments, f"{name}_{side}") for side in "ab"]
        if given.count(None) == 1:
            raise BadInput(f"--{name}-a and --{name}-b belong together")
    asks = bool(arguments.python_a or arguments.commit_a or arguments.setting)
    if arguments.repo is not None and not asks:
        raise BadInput("--repo belongs to --python-a and --python-b")
    return asks


def run_versions(arguments: argparse.Namespace) -> int:
    """Run one command with both versions as often as needed, and print the answer."""
    for name in _OF_TWO_COMMANDS:
        if getattr(arguments, name):
            raise BadInput(f"--{name} compares two commands, and there is one here")
    words = arguments.commands[arguments.commands[:1] == ["--"] :]
    if not words or "--" in words:
        raise BadInput("one command is needed: otel-torch bisect [options] -- train.py ARGS…")
    if arguments.json not in (None, "-"):
        check_writable(Path(arguments.json))
    # a link stays one, which a virtual environment needs
    pythons = Sides(arguments.python_a, arguments.python_b).map(
        lambda python: python and os.path.abspath(find_program(python))
    )
    commands = pythons.map(lambda python: make_command(words, python))
    find_program(commands.reference[0])
    folder: Path = arguments.out
    repository = arguments.repo or (Path() if arguments.commit_a else None)
    commits = None if repository is None else CommitLog(repository)
    with run_folder(folder, resumes=False), Progress() as progress, ends_early(None):
        progress("listing what is installed")
        environments = pythons.map(lambda python: list_environment(python or sys.executable))
        suspects = find_suspects(environments) if arguments.python_a else []
        links = environments.map(lambda own: link_what_a_recording_needs(own, folder))
        with _work_trees(arguments, commits, folder) as (trees, repositories):
            surroundings = Sides(*map(_surroundings, pythons, links, trees))
            programs = VersionPrograms(
                CommandPrograms(*commands, folder, timeout=arguments.timeout, tell=progress),
                [*suspects, *repositories],
                arguments.setting,
                surroundings,
            )
            tell = make_teller(progress)
            answer = VersionSearch(programs, run_options(arguments), commits, tell).search()
    if answer.verdict == "diverged":
        answer.bisection.report.following = [_again(arguments, words)]
    print_answer(arguments, answer, partial(render_version_bisection, answer))
    return close_runs(arguments, answer.bisection)


def _again(arguments: argparse.Namespace, words: Sequence[str]) -> NextStep:
    """Return the command to run once the program or the package is mended: the same one again."""
    names = ("--python-a", "--python-b", "--commit-a", "--commit-b", "--step", "--tolerance")
    options = given_options({own: vars(arguments)[own[2:].replace("-", "_")] for own in names})
    for setting in arguments.setting:
        options += ["--setting", f"{setting.name}={','.join(setting.values)}"]
    return NextStep(
        ["otel-torch", "bisect", *options, "--", *words],
        "mend the change, or what relies on the old code, and run this again",
        "status 0: verdict match, or the next changes",
    )


def make_command(words: Sequence[str], python: str | None) -> list[str]:
    """Return a command for an interpreter; None for the one that it names, or this one.

    >>> make_command(["train.py", "--steps", "2"], "old/bin/python")
    ['old/bin/python', 'train.py', '--steps', '2']
    >>> make_command(["python3", "train.py"], "old/bin/python")
    ['old/bin/python', 'train.py']
    """
    if words[0].endswith(".py"):
        return [python or sys.executable, *words]
    if _PYTHON.fullmatch(Path(words[0]).name):
        return [python or words[0], *words[1:]]
    return list(words)


def _surroundings(python: str | None, links: Path, tree: Path | None) -> Surroundings:
    paths = [str(links), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    if python is not None:  # for commands such as torchrun
        folders = [str(Path(python).parent), os.environ.get("PATH", os.defpath)]
        variables["PATH"] = os.pathsep.join(folders)
    # files of a tree change and keep size and second, by which bytecode is recognized
    if tree is not None:
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
    return Surroundings(tree, variables)


@contextmanager
def _work_trees(
    arguments: argparse.Namespace, commits: CommitLog | None, folder: Path
) -> Iterator[tuple[Sides[Path | None], list[Suspect]]]:
    """Check out both commits, if there are any; yield where each side runs, and the suspect."""
    if arguments.commit_a is None:
        yield Sides(None, None), []
        return
    assert commits is not None
    names = Sides(arguments.commit_a, arguments.commit_b).map(commits.resolve)
    with commits.work_trees(names, folder) as trees:
        inside = Path.cwd().resolve().relative_to(commits.root)
        suspect = Suspect(commits.root.name, names, trees.map(lambda tree: {"": tree}))
        yield trees.map(lambda tree: tree / inside), [suspect]
