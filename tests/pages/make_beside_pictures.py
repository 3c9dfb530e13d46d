"""Makes the pictures of docs/coming-from.md: `python -m tests.pages.make_beside_pictures`.
Run by hand: no test and no target of make does. Needs a Chromium, and pip to install the other tools
into build/beside once. Name pictures to make only those.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.pages.browser import Page, browser, find_or_exit
from tests.pages.recorded import ROOT, command
from tests.support import PROGRAMS, environment

PICTURES = ROOT / "docs" / "pictures"
TOOLS = ROOT / "build" / "beside"
VERSIONS = (
    "tensorboard==2.21.0", "netron==9.3.3", "viztracer==1.1.1", "wandb==0.31.0",
    "onnx==1.23.2", "onnxscript==0.7.2", "pyte==0.8.2",
)  # fmt: skip
PORT = 16006
ADDRESS = f"http://127.0.0.1:{PORT}/"
WIDTH, HEIGHT = 1280, 900
COMMANDS = TOOLS / "bin"
# the tools come last on the path, so that torch finds the numpy that it was tested with
TRAIN = """
import runpy, site, sys
site.addsitedir({packages!r})
sys.argv[1:] = [{tool!r}, "."]
runpy.run_path({program!r}, run_name="__main__")
"""


def record(tool: str, folder: Path, **variables: str) -> None:
    """Run the training as a tool records it."""
    packages = next(TOOLS.glob("lib/python*/site-packages"))
    program = str(PROGRAMS / "training/train_beside_other_tools.py")
    code = TRAIN.format(packages=str(packages), tool=tool, program=program)
    variables = {"OTEL_TORCH_ENABLED": "0", "WANDB_DISABLE_GIT": "true"} | variables
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, timeout=600,
        env=environment(folder, **variables),
    )  # fmt: skip


@contextmanager
def served(folder: Path, program: str, *words: str) -> Iterator[None]:
    """Have a tool serve its page while the block runs."""
    server = subprocess.Popen([COMMANDS / program, *words], cwd=folder)
    try:
        time.sleep(8)
        yield
    finally:
        server.terminate()
        server.wait()


def show(page: Page, folder: Path) -> None:
    """The first screen of our page."""
    record(
        "nothing", folder, OTEL_TORCH_ENABLED="1", OTEL_TORCH_JSONL="run.jsonl",
        OTEL_TORCH_CAPTURE="outputs,gradients", OTEL_TORCH_OTLP_FILE="otlp",
        OTEL_TORCH_STATS="abs_mean,min,max,std,nonfinite,histogram",
    )  # fmt: skip
    command(folder, "show", "run.jsonl", "--html", "show.html")
    page.open(folder / "show.html")
    page.screenshot(PICTURES / "beside-show.png")


def diff(page: Page, folder: Path) -> None:
    """The first screen of our comparison, with a port whose activation function is another."""
    for name in ("reference", "port"):
        record(
            name, folder, OTEL_TORCH_ENABLED="1", OTEL_TORCH_JSONL=f"{name}.jsonl", OTEL_TORCH_CAPTURE="parity"
        )  # fmt: skip
    command(folder, "diff", "reference.jsonl", "port.jsonl", "--html", "diff.html", status=1)
    page.open(folder / "diff.html")
    page.screenshot(PICTURES / "beside-diff.png")


def tensorboard(page: Page, folder: Path) -> None:
    """Cards of the loss and the broken block."""
    record("tensorboard", folder)
    words = ("--logdir", "tensorboard", "--host", "127.0.0.1", "--port", str(PORT))
    with served(folder, "tensorboard", *words):
        shown = "darkMode=false&smoothing=0&tagFilter=^loss|h.3.mlp.(act|c)"
        page.open(f"{ADDRESS}?{shown}#timeseries")
        time.sleep(8)
        click(page, 1244, 134)  # closes the settings
        time.sleep(4)
        page.screenshot(PICTURES / "beside-tensorboard.png")


def netron(page: Page, folder: Path) -> None:
    """The graph of the model, with what it knows of an operator."""
    record("netron", folder)
    with served(folder, "netron", "--host", "127.0.0.1", "--port", str(PORT), "model.onnx"):
        page.open(ADDRESS)
        time.sleep(3)
        click(page, 640, 562)  # accepts that it would report errors
        time.sleep(8)
        click(page, 262, 604)
        time.sleep(3)
        page.screenshot(PICTURES / "beside-netron.png")


def perfetto(page: Page, folder: Path) -> None:
    """The operators of a few steps, in time, and what it knows of one of them."""
    record("profiler", folder)
    with served(folder, "vizviewer", "--server_only", "--port", str(PORT), "profiler.json"):
        page.open(ADDRESS)
        time.sleep(15)
        click(page, 100, 204)  # unfolds the process
        time.sleep(3)
        click(page, 560, 259)
        page.point_at("html", 0.9, 0.95)
        time.sleep(3)
        page.screenshot(PICTURES / "beside-perfetto.png")


def wandb(page: Page, folder: Path) -> None:
    """An offline run in a terminal: its metrics that match a pattern."""
    record("wandb", folder)
    keys = "[2/^loss|h.3.\r"  # folds both sidebars away
    words = (COMMANDS / "wandb", "leet", "wandb/latest-run")
    screen = subprocess.run(
        [COMMANDS / "python", PROGRAMS / "show_a_terminal.py", keys, *words], cwd=folder,
        env=os.environ | {"HOME": str(folder)}, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    (folder / "screen.html").write_text(screen.stdout)
    page.open(folder / "screen.html")
    page.screenshot(PICTURES / "beside-wandb.png")


def click(page: Page, x: int, y: int) -> None:
    """Click a place of the window."""
    page.click("html", x / WIDTH, y / HEIGHT)


ALL: tuple[Callable[[Page, Path], None], ...] = (show, diff, tensorboard, netron, perfetto, wandb)


def main() -> int:
    program = find_or_exit()
    if not TOOLS.exists():
        subprocess.run([sys.executable, "-m", "venv", TOOLS], check=True)
        subprocess.run([COMMANDS / "pip", "install", "--quiet", *VERSIONS], check=True)
    for make in ALL:
        if make.__name__ in (sys.argv[1:] or [other.__name__ for other in ALL]):
            with (
                tempfile.TemporaryDirectory() as folder,
                browser(program, reach="127.0.0.1") as page,
            ):
                page.resize(WIDTH, HEIGHT)
                make(page, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
