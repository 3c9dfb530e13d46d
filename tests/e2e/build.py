"""Builds the Collector, Prometheus, Jaeger, Loki and the S3 server (Versity) that the tests start, so
that they are tested against and not assumed.

    python -m tests.e2e.build              what is missing
    python -m tests.e2e.build jaeger loki  these, what is missing of them

Each is a Go module in `backends/` whose versions are pinned and whose sums are checked in. What is
built is kept outside the repository, under a name that changes with the module, so a second run
builds nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

BACKENDS = Path(__file__).parent / "backends"
# the files of a module that determine the build
_SOURCES = ("*.go", "go.mod", "go.sum", "builder.yaml")


class Missing(Exception):
    """A program is missing and cannot be built; the message is one line for the user."""


@dataclass(frozen=True)
class Program:
    """A program that the tests start.

    name: its folder in `backends/`. version: of the module. package: the one that is built.
    minutes: of a cold build on two cores, if known. tags: of its build.
    """

    name: str
    version: str
    package: str
    minutes: int
    tags: str = ""

    @property
    def folder(self) -> Path:
        return BACKENDS / self.name

    @property
    def path(self) -> Path:
        """Return the path of the program after its build."""
        digest = hashlib.sha256(self.tags.encode())
        for source in sorted(path for pattern in _SOURCES for path in self.folder.glob(pattern)):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return cache() / f"{self.name}-{self.version}-{digest.hexdigest()[:12]}" / self.name


PROGRAMS = {
    program.name: program
    for program in (
        Program("collector", "v0.155.0", ".", 1),
        # service discovery for all clouds is two thirds of its code; here all data is
        # pushed to it
        Program(
            "prometheus",
            "v0.315.0",
            "github.com/prometheus/prometheus/cmd/prometheus",
            2,
            "remove_all_sd",
        ),
        Program("jaeger", "v1.76.0", "github.com/jaegertracing/jaeger/cmd/jaeger", 3),
        Program("loki", "v3.7.8", "github.com/grafana/loki/v3/cmd/loki", 4),
        # an S3 server
        Program("versitygw", "v1.8.0", "github.com/versity/versitygw/cmd/versitygw", 1),
    )
}


def cache() -> Path:
    """Return the folder of all builds."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "otel_torch" / "backends"


def find(name: str) -> Path:
    """Return the path of a built program.

    Raises:
        Missing: it was not built; the message says what to do.
    """
    path = PROGRAMS[name].path
    if not path.exists():
        raise Missing(f"{name} is not built; run: python -m tests.e2e.build {name}")
    return path


def build(name: str) -> Path:
    """Return the path of a program; build it if it is missing. If several processes call this, one
    builds and the others wait.

        Raises:
            Missing: Go is not installed, or the build failed.
    """
    program = PROGRAMS[name]
    path = program.path
    if path.exists():
        return path
    go = shutil.which("go")
    if go is None:
        raise Missing(
            f"{name} cannot be built: there is no Go (https://go.dev/dl); version {_go_version(program)} or newer"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _run_go(go, program, path)
    return path


def _run_go(go: str, program: Program, path: Path) -> None:
    say(
        f"building {program.name} {program.version}: about {program.minutes} minutes the first time"
    )
    started = time.monotonic()
    # a copy, as Go may not write into the module; and another name, so that half a program is never
    # found
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        module = Path(scratch) / "module"
        shutil.copytree(program.folder, module)
        made = Path(scratch) / program.name
        # without debug data, which takes a tenth of the time, and without inlining, which takes a quarter
        options = ["-mod=readonly", "-buildvcs=false", "-trimpath", "-tags", program.tags]
        options += ["-gcflags=all=-dwarf=false -l", "-ldflags=-s -w"]
        command = [go, "build", *options, "-o", str(made), program.package]
        # static, so that no C compiler is needed; and a compiler that seldom collects garbage, as
        # its processes are short-lived. Everything else about Go is this machine's own business
        environ = {"GOGC": "400"} | os.environ | {"CGO_ENABLED": "0"}
        log = path.parent / "build.log"
        with open(log, "w") as output:
            process = subprocess.Popen(
                command, cwd=module, env=environ, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                while True:
                    try:
                        status = process.wait(60)
                        break
                    except subprocess.TimeoutExpired:
                        say(
                            f"building {program.name}: {(time.monotonic() - started) / 60:.0f} minutes"
                        )
            finally:
                process.kill()
        if status:
            tail = "".join(f"\n  {line}" for line in log.read_text().splitlines()[-15:])
            raise Missing(
                f"{program.name} cannot be built (go build ended with {status}; all of it in {log}):{tail}"
            )
        os.replace(made, path)
    say(f"built {program.name} in {time.monotonic() - started:.0f} s: {path}")


def _go_version(program: Program) -> str:
    lines = (program.folder / "go.mod").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("go "))


def say(line: str) -> None:
    print(f"e2e: {line}", file=sys.stderr, flush=True)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        say(f"no such program: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
        return 2
    for name in names or PROGRAMS:
        try:
            say(f"{name}: {build(name)}")
        except Missing as problem:
            say(str(problem))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
