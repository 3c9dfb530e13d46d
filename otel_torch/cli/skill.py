"""`otel-torch skill`: prints what a coding agent should know, for its folder of skills."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "otel-torch skill > SKILL.md, in the folder where your agent looks for skills."


def run(arguments: argparse.Namespace) -> int:
    """Print the file."""
    sys.stdout.write(files("otel_torch").joinpath("SKILL.md").read_text(encoding="utf-8"))
    return 0
