"""Compiles the statistics' kernel when the package is installed, so that nobody has to, and nobody
needs a compiler.

The library is called through ctypes: it is of no Python version and needs no headers. Where there
is no compiler, or it fails, the package is installed without it and measures with torch, which is
said in one line.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "otel_torch/statistics"
SOURCES = ("kernel.c", "tensor.c")
NAME = "kernel.dylib" if sys.platform == "darwin" else "kernel.so"
# nothing that lets numbers differ between processors, or lets a NaN be taken for a number
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
FLAGS += ["-shared", "-fPIC", "-fvisibility=hidden"]
# one library with a variant for each generation of processors, or, where compiler or libc cannot do
# that, with one
VARIANTS: tuple[tuple[str, ...], ...] = ((), ("-DONE_TARGET",))
TIMEOUT = 300


def compiler() -> list[str] | None:
    """The command of this machine's C compiler: `$CC` if it is set, else the first of cc, gcc and
    clang.
    """
    if chosen := shlex.split(os.environ.get("CC", "")):
        return chosen if shutil.which(chosen[0]) else None
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def build(folder: Path, target: Path) -> str | None:
    """Compile the sources in `folder` into the shared library `target`, unless that is of these
    already; None, or in one line why there is none. Never raises.
    """
    command = compiler()
    if command is None:
        return f"no C compiler ({os.environ.get('CC') or 'cc, gcc, clang'})"
    reason = "it failed"
    # written beside and moved: a process that has the old one open keeps it
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
                *variant,
                f'-DSOURCE="{version}"',
                "-o",
                str(unfinished),
                *map(str, sources),
                "-lm",
            ]
            done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT)
            if done.returncode == 0:
                unfinished.replace(target)
                return None
            reason = next((text for text in done.stderr.splitlines() if "error" in text), reason)
        return f"{command[0]}: {reason}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    finally:
        unfinished.unlink(missing_ok=True)


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the wheel; for an editable installation, beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it makes a wheel; `version` is `standard` or `editable`."""
        folder = Path(self.root, FOLDER)
        self.temporary = tempfile.TemporaryDirectory()
        target = Path(folder if version == "editable" else self.temporary.name, NAME)
        if reason := build(folder, target):
            self.app.display_warning(
                f"otel_torch: no compiled kernel, torch will measure tensors: {reason}"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )
        if version != "editable":
            build_data["force_include"][str(target)] = f"{FOLDER}/{NAME}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is there."""
        self.temporary.cleanup()
