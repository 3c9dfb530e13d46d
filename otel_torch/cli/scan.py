"""The command `otel-torch scan`: print what a forward would do and what recording it would cost."""

from __future__ import annotations

import argparse
import json
import os
import sys

from otel_torch.cli.main import BadInput
from otel_torch.process.console import say
from otel_torch.rendering.near_name import near_name
from otel_torch.rendering.table import supports_color, terminal_size, write_line
from otel_torch.scanning.scan import Scan, read_settings, scan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="package.module:NAME or file.py:NAME, where NAME is a model, a model class, or a "
        "function that returns model, (model, args) or (model, args, kwargs); or a local folder "
        "with a config.json or model_index.json of transformers or diffusers",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=SHAPE[:DTYPE]",
        help="one input, such as hidden_states=1x16x32x32:bfloat16, ids=2x77:int64 or t=scalar; "
        "can be repeated",
    )
    parser.add_argument(
        "--component", metavar="NAME", help="the model to scan in the folder of a pipeline"
    )
    parser.add_argument(
        "--method", metavar="NAME", help="scan this method instead of the forward, such as decode"
    )
    parser.add_argument(
        "--modules", metavar="REGEX", help="select modules; overrides OTEL_TORCH_MODULES"
    )
    parser.add_argument(
        "--exclude", metavar="REGEX", help="exclude modules; overrides OTEL_TORCH_EXCLUDE"
    )
    parser.add_argument(
        "--forwards",
        type=_positive,
        default=1,
        metavar="N",
        help="show the cost of N forwards; 30 denoise steps with guidance have 60",
    )
    parser.add_argument("--all", action="store_true", help="list calls that are not selected too")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the report"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Return 0, or 2 if the forward fails after a call."""
    os.environ["OTEL_TORCH_ENABLED"] = "0"  # code that is loaded for the scan is not recorded
    overrides = {}
    for name in ("modules", "exclude"):
        value = getattr(arguments, name)
        if value is not None:
            overrides[name] = value
    settings = read_settings(overrides)
    import torch

    from otel_torch.scanning.target import load_target

    target, args, kwargs = load_target(
        arguments.target, arguments.component, arguments.method, arguments.input
    )
    with torch.set_grad_enabled("gradients" in settings.capture):
        result = scan(target, *args, **kwargs).with_settings(settings)
    problem = f"the forward of {result.model} failed {result.ended}" if result.failed else None
    if problem is not None and len(result.calls) <= 1:
        raise BadInput(problem)
    empty_selection = _describe_empty_selection(result)
    if empty_selection is not None:
        raise BadInput(empty_selection)
    if arguments.json:
        write_line(sys.stdout, json.dumps(result.as_json(), allow_nan=False))
    else:
        terminal = terminal_size(sys.stdout)
        report = result.render(
            everything=arguments.all,
            forwards=arguments.forwards,
            colour=supports_color(sys.stdout),
            width=terminal.columns if terminal else None,
        )
        write_line(sys.stdout, report)
    if problem is not None:
        say(problem)
        return 2
    return 0


def _describe_empty_selection(result: Scan) -> str | None:
    """Return why the selection would record nothing, or None if it would record something, or might
    if the scan had not ended early.
    """
    if result.selected:
        return None
    selected = [module.name for module in result.modules if module.selected]
    if selected:
        if result.ended is not None:
            return None
        listed = ", ".join(selected[:3]) + (", ..." if len(selected) > 3 else "")
        return (
            f"the selected modules of {result.model} ({listed}) are never called by this forward: "
            "nothing would be recorded"
        )
    names = [module.name for module in result.modules if module.name]
    example = f", for example {names[-1]!r}" if names else ""
    modules = result.settings.modules
    hint = "" if modules is None else near_name(modules.pattern, names)
    return (
        f"no module of {result.model} is selected ({len(result.modules)} modules{example}); "
        "see --modules, --exclude and OTEL_TORCH_MODULES, OTEL_TORCH_EXCLUDE, OTEL_TORCH_MODELS, "
        f"OTEL_TORCH_ACTIVATIONS{hint}"
    )
