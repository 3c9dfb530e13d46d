"""The natural regions of a diffusion program: before, during and after denoising, found from
pipeline and schedule.
"""

from __future__ import annotations

from otel_torch.records import Scope
from otel_torch.regions import entry


class Denoising:
    """At most one of the three regions is open. A loop without a pipeline around it has only the
    middle one.
    """

    def __init__(self) -> None:
        self._open: tuple[str, Scope | None] | None = None
        self._pipelines = 0

    def pipeline_entered(self) -> None:
        """A pipeline's call begins."""
        self._pipelines += 1
        if self._pipelines == 1:
            self._switch("inference_pre_denoising")

    def pipeline_left(self, error: BaseException | None = None) -> None:
        """A pipeline's call is over."""
        self._pipelines -= 1
        if self._pipelines == 0:
            self._switch(None, error)

    def step_begins(self) -> None:
        """A forward runs within a schedule."""
        if self._open is None or self._open[0] != "inference_denoising":
            self._switch("inference_denoising")

    def schedule_used_up(self) -> None:
        """The schedule's last step is done."""
        if self._open is not None and self._open[0] == "inference_denoising":
            self._switch("inference_post_denoising" if self._pipelines else None)

    def finish(self) -> None:
        """The program ends."""
        self._switch(None)

    def _switch(self, name: str | None, error: BaseException | None = None) -> None:
        if self._open is not None:
            entry.close_region(self._open[1], error)
        self._open = (name, entry.open_region(name, lexical=False)) if name is not None else None
