"""Compiles the statistics kernel when the package is installed.

The library is called through ctypes, so that it needs no headers and fits every version of Python.
Without a working compiler the package is installed without it, with a warning, and measures with
torch.
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
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "otel_torch/statistics"
SOURCES = ("kernel.c", "avx2.c", "tensor.c", "observer.c", "lines.c", "native.h")
NAME = "kernel.dylib" if sys.platform == "darwin" else "kernel.so"
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


def build(folder: Path, target: Path) -> str | None:
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
        sources = [folder / name for name in SOURCES]
        version = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
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
                *(str(source) for source in sources if source.suffix == ".c"),
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
    """Adds the library to the wheel; for an editable installation, writes it next to its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds a wheel. `version`: `standard` or `editable`."""
        folder = Path(self.root, FOLDER)
        self.temporary = tempfile.TemporaryDirectory()
        target = Path(folder if version == "editable" else self.temporary.name, NAME)
        if reason := build(folder, target):
            self.app.display_warning(
                f"otel_torch: no compiled kernel: {reason}. Everything works, but measuring a"
                " tensor on a CPU takes 4 to 30 times as long. Install again with a C compiler"
            )
            return
        build_data["pure_python"] = False
        platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
        build_data["tag"] = f"py3-none-{platform}"  # the library serves every Python
        if version != "editable":
            build_data["force_include"][str(target)] = f"{FOLDER}/{NAME}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after the wheel is built."""
        self.temporary.cleanup()
