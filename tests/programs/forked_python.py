"""Stands in for `python` in a command: has a warm interpreter fork what it was called to run, and ends as that does.

    python -IS forked_python.py PYTHON ADDRESS VARIABLES STAND_IN FOLDERS WORD…

PYTHON runs what cannot be forked: other options than `-u` and `-m`, and programs in whose environment
Python or torch would load otherwise than the interpreter at ADDRESS did, with VARIABLES. STAND_IN is
what the program finds as `sys.executable`, and FOLDERS are on its path after those of PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

# read by the interpreter, by the dynamic linker or by libraries while they are loaded; CUDA reads its
# own when it is used first, which no warm interpreter does
READ_AT_LOAD = (
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
)
# set where torch compiles, in the tests' own process as well, and by torchrun; read at use
SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "TORCHELASTIC_", "TORCH_NCCL_")
# what a forked program takes over itself
TAKEN_OVER = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": ""}


def read_at_load(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that have an effect while Python and torch are loaded."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(READ_AT_LOAD) and not name.startswith(SET_BY_TORCH)
    }


def added_folders(variables: Mapping[str, str], warm: Mapping[str, str]) -> list[str] | None:
    """Return the folders that PYTHONPATH has before those of a warm interpreter, or None if it has others."""
    path, known = variables.get("PYTHONPATH", ""), warm.get("PYTHONPATH", "")
    if not path.endswith(known):
        return None
    return [folder for folder in path.removesuffix(known).split(os.pathsep) if folder]


def loads_alike(variables: Mapping[str, str], warm: Mapping[str, str]) -> bool:
    """Return whether Python and torch load with these variables as they do in a warm interpreter with its own."""
    known, other = (read_at_load(each) | TAKEN_OVER for each in (warm, variables))
    return known == other and added_folders(variables, warm) is not None


def main(
    python: str, address: str, variables: str, stand_in: str, folders: str, *words: str
) -> None:
    argv = list(words[1:] if words[:1] == ("-u",) else words)
    is_program = bool(argv) and (argv[0] == "-m" or not argv[0].startswith("-"))
    warm_variables = json.loads(variables)
    added = added_folders(os.environ, warm_variables)
    if not is_program or added is None or not loads_alike(os.environ, warm_variables):
        os.execv(python, [python, *words])
    request = {
        "argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "is_taken_apart": False, "executable": stand_in,
        "added_folders": [*added, *filter(None, folders.split(os.pathsep))],
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm:
        warm.connect("\0" + address)
        socket.send_fds(warm, [json.dumps(request).encode()], [0, 1, 2])
        program = int(warm.recv(16))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os.kill(program, number))
        status = int(warm.recv(16))
    if status < 0:
        with suppress(OSError):  # of SIGKILL nothing can be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
