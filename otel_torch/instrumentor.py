"""OpenTelemetry's own door: `opentelemetry-instrument python train.py` records without
`OTEL_TORCH_ENABLED`.

The wrapper is the switch there; only an explicit `OTEL_TORCH_ENABLED=off` keeps us out. Session and
wiring are those of the environment switch, so both together record once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from otel_torch.startup import OFF, name_this_run, say_not_started
from otel_torch.startup.import_hooks import after_import

try:
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
except ImportError:
    raise ImportError(
        "OtelTorchInstrumentor needs opentelemetry-instrumentation: pip install 'otel-torch[instrument]'"
    ) from None

_SWITCH = "OTEL_TORCH_ENABLED"


class OtelTorchInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """`instrument(**settings)` starts recording as `otel_torch.start(**settings)` does;
    `uninstrument()` stops it.

    Nothing is started, and nothing of torch imported, before the program itself imports torch.
    """

    _settings: dict[str, Any] | None = None
    _switched_on = False

    def instrumentation_dependencies(self) -> Collection[str]:
        """What a manual `instrument()` checks; the wrapper reads the same from the extra
        `instruments`.
        """
        return ("torch >= 2.9",)

    def _instrument(self, **settings: Any) -> None:
        word = os.environ.get(_SWITCH, "").strip().lower()
        if word and word in OFF:
            return
        if not word:
            # processes started from here are recorded too, those that ignore PYTHONPATH and so the
            # wrapper included
            os.environ[_SWITCH] = "1"
            self._switched_on = True
        self._settings = settings
        name_this_run()
        after_import("torch", self._start)

    def _uninstrument(self, **_: Any) -> None:
        if self._switched_on:
            os.environ.pop(_SWITCH, None)
        self._settings, self._switched_on = None, False
        from otel_torch.bootstrap import stop

        stop()

    def _start(self, torch: object) -> None:
        if self._settings is None:
            return  # uninstrumented before torch was imported
        try:
            from otel_torch.bootstrap import start

            start(**self._settings)
        except Exception as error:
            say_not_started(error)
