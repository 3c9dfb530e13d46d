"""Records both programs and compares them.

Importing vLLM takes half a minute and loading a model five seconds, serving three requests less
than one. So this process imports it once, and forks: one child loads a family, and each fault is
planted in a child of that one, which ends with it. There is nothing to undo. transformers runs in
a child of this process, because vLLM changes the classes of a model that it takes from there. The
variables of `environment` must be set before torch is imported.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from otel_torch import bootstrap
from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Report
from tests.corpora.engines.cases import FAULTS, Engine
from tests.corpora.engines.families import (
    FAMILIES,
    load_engine,
    save_checkpoint,
    serve,
)

_Result = TypeVar("_Result")
# a fork that waits for a thread it does not have ends after this time
_TIMEOUT_S = 600
# what vLLM imports only while it loads a model
_IMPORTED_LATE = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mixtral",
)


# what is recorded, by how the programs are compared
TOKENS: Mapping[str, str] = {"capture": "tokens"}
ROWS: Mapping[str, str] = {"capture": "graph", "graph_rows": "on", "steps": "*/1"}


def compare(
    folder: Path, engine: Engine, faults: Sequence[str], settings: Mapping[str, str] = TOKENS
) -> list[Report]:
    """Return a report for each fault; that without a name is the clean engine.

    Raises: RuntimeError, if a program ends without a result.
    """
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    family, checkpoint = FAMILIES[engine.family], folder / engine.family
    if not checkpoint.exists():
        save_checkpoint(family, checkpoint)
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    for fault in faults:
        (runs / fault).mkdir(parents=True, exist_ok=True)
    if engine.compiled:  # recording must begin before vLLM compiles
        served = [
            _in_child(_serve, runs, checkpoint, engine, fault, None, settings) for fault in faults
        ]
    else:
        served = _in_child(_serve_all, runs, checkpoint, engine, faults, settings)
    return [
        _in_child(_compare, runs / fault, checkpoint, engine, tokens, settings)
        for fault, tokens in zip(faults, served, strict=True)
    ]


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


def _serve_all(
    runs: Path,
    checkpoint: Path,
    engine: Engine,
    faults: Sequence[str],
    settings: Mapping[str, str],
) -> list[list[list[int]]]:
    loaded = load_engine(FAMILIES[engine.family], checkpoint, engine.dtype, False)
    return [
        _in_child(_serve, runs, checkpoint, engine, fault, loaded, settings) for fault in faults
    ]


def _serve(
    runs: Path,
    checkpoint: Path,
    engine: Engine,
    fault: str,
    loaded: Any,
    settings: Mapping[str, str],
) -> list[list[int]]:
    family = FAMILIES[engine.family]
    if loaded is not None and fault:
        loaded.apply_model(FAULTS[fault])
    bootstrap.start(jsonl=str(runs / fault / "engine.jsonl"), **settings)
    try:
        if loaded is None:
            loaded = load_engine(family, checkpoint, engine.dtype, engine.compiled)
        return serve(family, loaded)
    finally:
        bootstrap.stop()


def _compare(
    run: Path,
    checkpoint: Path,
    engine: Engine,
    tokens: list[list[int]],
    settings: Mapping[str, str],
) -> Report:
    """Record transformers with the engine's tokens, and compare both."""
    bootstrap.start(jsonl=str(run / "reference.jsonl"), **settings)
    try:
        FAMILIES[engine.family].reference(checkpoint, engine.dtype, tokens)
    finally:
        bootstrap.stop()
    return diff(run / "reference.jsonl", run / "engine.jsonl")
