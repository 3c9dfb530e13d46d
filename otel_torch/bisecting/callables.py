"""`otel_torch.bisect`: two functions or models in this process instead of two commands."""

from __future__ import annotations

import copy
import gc
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from otel_torch import bootstrap
from otel_torch.bisecting.bisection import Bisection
from otel_torch.bisecting.kept_state import kept_as_it_is
from otel_torch.bisecting.recorded_programs import Noise, RunOptions
from otel_torch.bisecting.runs import ProgramRun, RunFailed, SideName, find_recordings
from otel_torch.bisecting.search import Options, bisect_programs
from otel_torch.process.console import suppress

_RUN_ID = "OTEL_TORCH_RUN_ID"


def bisect(
    reference: Callable[..., Any],
    port: Callable[..., Any],
    inputs: Any = (),
    *,
    port_inputs: Any = None,
    noise: Noise = "auto",
    tolerance: float | None = None,
    module: str | None = None,
) -> Bisection:
    """Find the lines in which a port begins to differ from its reference, and try each answer.

    Both run several times from the same random state. What they change in models, optimizers,
    schedules and generators is undone after each run: in those that a function reaches by its
    closure, its arguments, global names, and the object whose method it is.

    Args:
        reference: A model, or a function.
        port: Likewise.
        inputs: A tensor, a tuple of arguments, a dict of keyword arguments, or a function that
            calls what it is given. Each run gets a copy.
        port_inputs: The same for the port, if it takes other arguments.
        noise: Whether the reference also runs with noise, to learn how far rounding moves each
            value: `auto` where it computes in a dtype coarser than float32.
        tolerance: A relative L2 error that always matches.
        module: Only faults in modules with such a name (a regular expression) count.

    Returns:
        The answer: `faults` with `line`, `port_line` and `proof`; `as_json()` is what `otel-torch
        bisect --json` prints.

    Raises:
        ValueError: A session records in this process already; or a recording cannot be compared.

    >>> import torch
    >>> model = torch.nn.Linear(8, 8); scale = lambda x: model(x) * 0.5
    >>> answer = bisect(model, scale, torch.randn(4, 8))
    >>> answer.verdict, answer.faults[0].proof
    ('diverged', 'proven')
    """
    if bootstrap.is_running():
        raise ValueError(
            "a session records in this process: call otel_torch.stop() before otel_torch.bisect()"
        )
    pattern = None if module is None else re.compile(module)
    folder = Path(tempfile.mkdtemp(prefix="otel-torch-bisect-"))
    given = {
        "reference": (reference, inputs),
        "port": (port, inputs if port_inputs is None else port_inputs),
    }
    calls = {side: partial(_call_with_copy, *own) for side, own in given.items()}
    options = Options(RunOptions(noise, tolerance), pattern)
    try:
        return bisect_programs(CallablePrograms(calls, folder, given), options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class CallablePrograms:
    """Two functions without arguments, recorded in this process.

    Args:
        calls: By side.
        folder: Where each run gets a folder.
        changing: By side, functions and models: what they change is undone after each run.
    """

    def __init__(
        self,
        calls: Mapping[str, Callable[[], Any]],
        folder: Path,
        changing: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    ) -> None:
        self._calls, self.folder, self._changing = dict(calls), folder, changing
        self.runs: list[ProgramRun] = []

    def run(self, side: SideName, why: str, settings: Mapping[str, str]) -> ProgramRun:
        """Call a function while its operations are recorded.

        Raises:
            RunFailed: It raised, or ran no operation of torch.
        """
        folder = self.folder / f"{len(self.runs) + 1}-{side}"
        folder.mkdir(parents=True)
        began = time.monotonic()
        recordings = self._record(side, folder, settings)
        if not recordings:  # recording begins with a module, and the function calls none
            self._calls[side] = _as_module(self._calls[side])
            recordings = self._record(side, folder, settings)
        if not recordings:
            raise RunFailed(f"the {side} ran no operation of torch, so nothing was recorded")
        run = ProgramRun(side, why, (), time.monotonic() - began, recordings)
        self.runs.append(run)
        return run

    def _record(self, side: SideName, folder: Path, settings: Mapping[str, str]) -> dict[int, Path]:
        """Call a function while it is recorded; return the recordings, by rank."""
        gc.collect()  # models of an earlier run would have names of their own
        # outside of the session, which would record and interpret what is kept and put back
        kept = kept_as_it_is(*self._changing.get(side, ()))
        with kept, _same_random_state(), _without_run_id(), suppress(""):
            bootstrap.start(**settings, jsonl=str(folder / "recording.jsonl"))
            try:
                bootstrap.add_result(self._calls[side]())
            except Exception as error:
                raise RunFailed(f"the {side} raised {type(error).__name__}: {error}") from error
            finally:
                bootstrap.stop()
        return find_recordings(folder)


def _as_module(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that does what a call does within a module."""
    import torch

    class Function(torch.nn.Module):
        def forward(self, results: list[Any]) -> None:
            results.append(call())

    def run() -> Any:
        results: list[Any] = []
        Function()(results)
        return results[0]

    return run


def _call_with_copy(function: Callable[..., Any], inputs: Any) -> Any:
    """Call a function, or a model, with a copy of its inputs."""
    inputs = _copied(inputs)
    if isinstance(inputs, dict):
        return function(**inputs)
    if isinstance(inputs, tuple | list):
        return function(*inputs)
    if callable(inputs):
        return inputs(function)
    return function(inputs)


def _copied(inputs: Any) -> Any:
    """Return a copy of inputs, which no graph of operations shows."""
    from otel_torch.torch_private import unobserved

    return unobserved(copy.deepcopy)(inputs)


@contextmanager
def _without_run_id() -> Iterator[None]:
    """Take back the run's name, which a session leaves for child processes."""
    before = os.environ.get(_RUN_ID)
    try:
        yield
    finally:
        os.environ.pop(_RUN_ID, None)
        if before is not None:
            os.environ[_RUN_ID] = before


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Have the block begin with the random state before it, and leave that behind."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
