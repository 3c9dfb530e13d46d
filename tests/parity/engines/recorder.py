"""Records both programs and compares them.

Importing vLLM takes half a minute and loading a model five seconds, serving three requests less
than one. So this process imports it once, and forks: one child loads a family, and each fault is
planted in a child of that one, which ends with it. There is nothing to undo. The variables of
`environment` must be set before torch is imported.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from otel_torch import bootstrap
from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Report
from tests.parity.engines.corpus import FAULTS, Engine
from tests.parity.engines.families import (
    FAMILIES,
    Family,
    forward_once,
    load_engine,
    save_checkpoint,
    serve,
)

_Result = TypeVar("_Result")
# a fork that waits for a thread it does not have ends after this time
_TIMEOUT_S = 600


def compare(folder: Path, engine: Engine, faults: Sequence[str]) -> list[Report]:
    """Return a report for each fault; that without a name is the clean engine.

    Raises: RuntimeError, if a program ends without a result.
    """
    family, checkpoint = FAMILIES[engine.family], folder / engine.family
    if not checkpoint.exists():
        save_checkpoint(family, checkpoint)
    if engine.compiled:  # recording must begin before vLLM compiles
        return [_in_child(_compare, folder, engine, fault, None) for fault in faults]
    return _in_child(_compare_all, folder, engine, faults)


def _in_child(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Call a function in a fork of this process and return its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_TIMEOUT_S)
        try:
            with open(writer, "wb") as pipe:
                pickle.dump(function(*arguments), pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # the parent runs the exit handlers
    os.close(writer)
    with open(reader, "rb") as pipe:
        pickled = pipe.read()
    os.waitpid(child, 0)
    if not pickled:
        raise RuntimeError(f"{function.__name__}{arguments} ended without a result")
    result: _Result = pickle.loads(pickled)
    return result


def _compare_all(folder: Path, engine: Engine, faults: Sequence[str]) -> list[Report]:
    loaded = load_engine(FAMILIES[engine.family], folder / engine.family, engine.dtype, False)
    return [_in_child(_compare, folder, engine, fault, loaded) for fault in faults]


def _compare(folder: Path, engine: Engine, fault: str, loaded: Any) -> Report:
    """Record the engine and then transformers with its tokens, and compare them."""
    family, checkpoint = FAMILIES[engine.family], folder / engine.family
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir()
    tokens = _in_child(_serve, runs, family, checkpoint, engine, fault, loaded)
    _in_child(_record_reference, runs, checkpoint, engine.dtype, tokens)
    return diff(runs / "reference.jsonl", runs / "engine.jsonl")


def _serve(
    runs: Path, family: Family, checkpoint: Path, engine: Engine, fault: str, loaded: Any
) -> list[list[int]]:
    if loaded is not None and fault:
        loaded.apply_model(FAULTS[fault].plant)
    bootstrap.start(jsonl=str(runs / "engine.jsonl"), capture="tokens")
    try:
        if loaded is None:
            loaded = load_engine(family, checkpoint, engine.dtype, engine.compiled)
        return serve(family, loaded)
    finally:
        bootstrap.stop()


def _record_reference(runs: Path, checkpoint: Path, dtype: str, tokens: list[list[int]]) -> None:
    bootstrap.start(jsonl=str(runs / "reference.jsonl"), capture="tokens")
    try:
        forward_once(checkpoint, dtype, tokens)
    finally:
        bootstrap.stop()
