"""Compiles the statistics kernel and the scanner of recordings when the package is installed.

They are called through ctypes, so that they need no headers and fit every version of Python.
Without a working compiler the package is installed without them, with a warning: it measures with
torch, and reads recordings in Python.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class Library(NamedTuple):
    """A shared library in the package. cost: What a user notices without it."""

    folder: str
    name: str
    sources: tuple[str, ...]
    cost: str

    @property
    def path(self) -> str:
        """The path of the library in the package, in the folder of its sources."""
        return f"{self.folder}/{self.name}"


KERNEL = Library(
    "otel_torch/statistics/native",
    f"kernel{SUFFIX}",
    (
        "kernel.c",
        "vectors.h",
        "avx2.c",
        "avx512.c",
        "tensor.c",
        "recognizer.c",
        "observer.c",
        "module_call.c",
        "lines.c",
        "native.h",
        "layout.h",
    ),
    "measuring a tensor on a CPU takes 4 to 30 times as long",
)
SCANNER = Library(
    "otel_torch/recording",
    f"libscanner{SUFFIX}",
    ("scanner.c",),
    "comparing long recordings takes twice as long",
)
LIBRARIES = (KERNEL, SCANNER)
# no flag that makes numbers differ between processors or ignores NaN
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
FLAGS += ["-shared", "-fPIC", "-fvisibility=hidden"]
# what a Mac compiles for; the wheel's tag follows the same variable
ARCHITECTURES = shlex.split(os.environ.get("ARCHFLAGS", "")) if sys.platform == "darwin" else []
# first a library with a variant for each processor generation; if the compiler or libc does not
# support that, a library with one variant
VARIANTS: tuple[tuple[str, ...], ...] = ((), ("-DONE_TARGET",))
TIMEOUT_S = 300


def compiler() -> list[str] | None:
    """Return the command of the C compiler: `$CC` if set, else the first of cc, gcc and clang."""
    if command := shlex.split(os.environ.get("CC", "")):
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def build(folder: Path, target: Path, sources: tuple[str, ...] = KERNEL.sources) -> str | None:
    """Compile the sources in `folder` into the shared library `target`, if it is not up to date.

    Never raises.

    Returns:
        None, or in one line the reason why it failed.
    """
    command = compiler()
    if command is None:
        return f"no C compiler ({os.environ.get('CC') or 'cc, gcc, clang'})"
    reason = "it failed"
    # written to another file and moved, so that processes that use the old library keep it
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        paths = [folder / name for name in sources]
        version = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
        if target.exists() and version.encode() in target.read_bytes():
            return None
        for variant in VARIANTS:
            line = [
                *command,
                *FLAGS,
                *ARCHITECTURES,
                *variant,
                f'-DSOURCE="{version}"',
                "-o",
                str(unfinished),
                *(str(path) for path in paths if path.suffix == ".c"),
                "-lm",
            ]
            result = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S)
            if result.returncode == 0:
                unfinished.replace(target)
                return None
            reason = next((text for text in result.stderr.splitlines() if "error" in text), reason)
        return f"{command[0]}: {reason}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    finally:
        unfinished.unlink(missing_ok=True)


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries to the wheel; for an editable installation, writes them next to their
    sources.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel. `version`: `standard` or `editable`."""
        self.temporary = tempfile.TemporaryDirectory()
        for library in LIBRARIES:
            folder = Path(self.root, library.folder)
            target = Path(folder if version == "editable" else self.temporary.name, library.name)
            if reason := build(folder, target, library.sources):
                name = Path(library.sources[0]).stem
                self.app.display_warning(
                    f"otel_torch: no compiled {name}: {reason}. Everything works, but"
                    f" {library.cost}. Install again with a C compiler"
                )
                continue
            build_data["pure_python"] = False
            platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
            build_data["tag"] = f"py3-none-{platform}"  # the libraries serve every Python
            if version != "editable":
                build_data["force_include"][str(target)] = library.path

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after the wheel is built."""
        self.temporary.cleanup()
