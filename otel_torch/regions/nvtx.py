"""NVTX ranges, so that Nsight Systems shows the names that the spans have. Nothing without CUDA,
and nothing unless asked for.
"""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import Any

import torch

from otel_torch import session
from otel_torch.console import say_once
from otel_torch.regions.fallback_settings import read_environment


@functools.lru_cache(maxsize=8)
def _parsed(ours: str | None, theirs: str | None) -> bool:
    return read_environment("nvtx").nvtx


def wants_nvtx() -> bool:
    """Whether NVTX ranges were asked for, by the session or else by the environment, and CUDA is
    there to take them.
    """
    running = session.current()
    if running is not None:
        asked = running.settings.nvtx
    else:
        asked = _parsed(os.environ.get("OTEL_TORCH_NVTX"), os.environ.get("FASTVIDEO_NVTX_PROFILE"))
    return asked and torch.cuda.is_available()


class nvtx_range:
    """Push an NVTX range around a block, where OTEL_TORCH_NVTX is on and CUDA available; else do
    nothing.

    The range is popped, and the exception passed on, when the block raises.

    >>> with nvtx_range("vae.decode"):
    ...     pass
    """

    __slots__ = ("_pushed", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._pushed: list[bool] = []

    def __enter__(self) -> nvtx_range:
        if torch.compiler.is_compiling():
            return self
        pushed = False
        try:
            if wants_nvtx():
                nvtx: Any = torch.cuda.nvtx
                nvtx.range_push(self.name)
                pushed = True
        except Exception as error:
            say_once(f"NVTX ranges do not work here: {type(error).__name__}: {error}")
        self._pushed.append(pushed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling():
            return
        if self._pushed and self._pushed.pop():
            try:
                nvtx: Any = torch.cuda.nvtx
                nvtx.range_pop()
            except Exception as problem:
                say_once(f"NVTX ranges do not work here: {type(problem).__name__}: {problem}")
