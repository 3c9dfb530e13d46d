"""The natural regions of a diffusion program: before, during and after the denoising loop.

They are detected from pipeline calls and schedules, for example in a text-to-image program:

    start_pipeline()     inference_pre_denoising opens    (text encoder)
    start_denoising()    inference_denoising opens        (at each denoise step; the first counts)
    end_denoising()      inference_post_denoising opens   (the schedule is used up; VAE)
    end_pipeline()       it closes
"""

from __future__ import annotations

from otel_torch.records import Scope
from otel_torch.regions import entry


class Denoising:
    """Opens at most one of the three regions at a time.

    A denoising loop outside of a pipeline has only the middle one.
    """

    def __init__(self) -> None:
        # name and scope of the open region
        self._open: tuple[str, Scope | None] | None = None
        self._pipelines = 0

    def start_pipeline(self) -> None:
        self._pipelines += 1
        if self._pipelines == 1:
            self._switch("inference_pre_denoising")

    def end_pipeline(self, error: BaseException | None = None) -> None:
        self._pipelines -= 1
        if self._pipelines == 0:
            self._switch(None, error)

    def start_denoising(self) -> None:
        """Handle a forward pass within a schedule."""
        if not self._is_denoising:
            self._switch("inference_denoising")

    def end_denoising(self) -> None:
        """Handle the end of the schedule's last step."""
        if self._is_denoising:
            self._switch("inference_post_denoising" if self._pipelines else None)

    def finish(self) -> None:
        """Close the open region at the end of the program."""
        self._switch(None)

    @property
    def is_in_pipeline(self) -> bool:
        return self._pipelines > 0

    @property
    def _is_denoising(self) -> bool:
        return self._open is not None and self._open[0] == "inference_denoising"

    def _switch(self, name: str | None, error: BaseException | None = None) -> None:
        if self._open is not None:
            entry.close_region(self._open[1], error)
        self._open = (name, entry.open_region(name, lexical=False)) if name is not None else None
