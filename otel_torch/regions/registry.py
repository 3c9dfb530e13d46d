"""The registered regions, and which of them the settings select.

A closed list would let a misspelt region record nothing without a warning. Here every region of
FastVideo's code and documentation is registered, so an unknown name can be told from one that the
settings leave out, and is reported once.
"""

from __future__ import annotations

import difflib
import functools
import sys
from dataclasses import dataclass
from typing import NamedTuple

from otel_torch import session
from otel_torch.settings import RegionSelection

PREFIX = "profiler_region_"
# distinct span names of unregistered ranges; further ranges share one name, because backends index
# span names
MAX_UNREGISTERED_NAMES = 100

# from FastVideo's code and its documentation
_BUILT_IN = {
    "model_loading": "Loading of the pipeline's modules.",
    "inference_pre_denoising": "Conditioning and preparation before the denoising loop.",
    "inference_denoising": "The denoising loop.",
    "inference_post_denoising": "Decoding and everything else after the denoising loop.",
    "training_train": "The training loop as a whole.",
    "training_epoch": "One pass over the training data.",
    "training_step": "One training step.",
    "training_train_one_step": "One optimizer step with its forward and backward passes.",
    "training_dit": "The forward pass of the model in training.",
    "training_backward": "The backward pass.",
    "training_optimizer": "The optimizer's update.",
    "training_validation": "Validation during training.",
    "training_save_checkpoint": "Saving of a checkpoint.",
    "training_checkpoint_saving": "Saving of a checkpoint, as FastVideo documents it.",
    "distillation_teacher_forward": "Forward pass of the teacher.",
    "distillation_student_forward": "Forward pass of the student.",
    "distillation_loss": "The distillation loss.",
    "distillation_update": "Parameter updates of a distillation.",
}
# what natural regions are called in a program that has no names of its own for them
PLAIN_NAMES = {
    "profiler_region_training_step": "torch.step",
    "profiler_region_training_backward": "torch.backward",
    "profiler_region_training_optimizer": "torch.optimizer.step",
}
# FastVideo's code and its documentation name this region differently; either name selects both
_SYNONYMS = {
    "profiler_region_training_save_checkpoint": "profiler_region_training_checkpoint_saving",
    "profiler_region_training_checkpoint_saving": "profiler_region_training_save_checkpoint",
}


@dataclass(frozen=True)
class ProfilerRegion:
    """A registered region: its lower-case name and a one-sentence description.

    Raises:
        ValueError: the name is empty, has surrounding blanks, or is not lower-case.
    """

    name: str
    description: str

    def __post_init__(self) -> None:
        if not self.name or self.name.strip() != self.name or not self.name.islower():
            raise ValueError(
                f"invalid region name {self.name!r}: use lower case without surrounding blanks"
            )

    @property
    def short(self) -> str:
        """The name without `profiler_region_`."""
        return self.name.removeprefix(PREFIX)


_registered: dict[str, ProfilerRegion] = {}


def normalise(name: str) -> str:
    """Return the form in which names are compared: lower-case, stripped, `_` for inner blanks.

    >>> normalise("  Model Loading ")
    'model_loading'
    """
    return "_".join(name.lower().split())


def register_profiler_region(name: str, description: str) -> None:
    """Register a region, so that entering it opens a span.

    Raises:
        ValueError: the name is empty, or already registered in its short or long form.
    """
    region = ProfilerRegion(normalise(name), description)
    for spelling in (region.name, PREFIX + region.name, region.short):
        if spelling in _registered:
            raise ValueError(f"region {name!r} is already registered, as {spelling!r}")
    _registered[region.name] = region
    choose.cache_clear()
    if (current := session.current()) is not None:
        current.region_labels.clear()


def resolve_profiler_region(name: str) -> ProfilerRegion | None:
    """Return the registered region of a long or short name in any case, or None.

    Examples:
        >>> resolve_profiler_region(" Inference_Denoising").name
        'profiler_region_inference_denoising'
    """
    normalised = normalise(name)
    return _registered.get(PREFIX + normalised) or _registered.get(normalised)


def list_profiler_regions() -> list[ProfilerRegion]:
    """Return all registered regions, sorted by name."""
    return [_registered[name] for name in sorted(_registered)]


def names_of(region: ProfilerRegion) -> tuple[str, ...]:
    """Return every name by which a setting may select the region."""
    names = [region.name, region.short]
    if region.name in PLAIN_NAMES:
        names.append(PLAIN_NAMES[region.name])
    synonym = _SYNONYMS.get(region.name)
    if synonym is not None:
        names += [synonym, synonym.removeprefix(PREFIX)]
    return tuple(names)


def plain_name(region: str) -> str | None:
    """Return what a natural region is called in this program, if not by its registered name.

    A program that has imported FastVideo, or has registered a region, sees registered names only.

    >>> plain_name("profiler_region_training_backward")
    'torch.backward'
    """
    if len(_registered) > len(_BUILT_IN) or "fastvideo" in sys.modules:
        return None
    return PLAIN_NAMES.get(region)


def explain_unknown(name: str) -> str:
    """Return the message for an unregistered name, with the closest registered one if any."""
    names: list[str] = []
    for region in list_profiler_regions():
        names += [region.short, region.name]
    close = difflib.get_close_matches(normalise(name), names, n=1)
    suggestion = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"region {name!r} is not registered{suggestion}: it opens no span; "
        "register it with register_profiler_region, or name it in OTEL_TORCH_REGIONS"
    )


class RegionChoice(NamedTuple):
    """A name under some settings. span_name: None if the settings do not select the region."""

    region: str
    span_name: str | None
    is_registered: bool


@functools.lru_cache(maxsize=4096)
def choose(name: str, selected: RegionSelection, prefix: str) -> RegionChoice:
    """Resolve `name` where the settings select the regions `selected`.

    prefix: of the span names of registered regions.
    """
    region = resolve_profiler_region(name)
    if region is None:
        return RegionChoice(name, name if selected.matches(name) else None, False)
    if selected.registered or selected.matches(*names_of(region)):
        return RegionChoice(region.name, prefix + region.name, True)
    return RegionChoice(region.name, None, True)


_unregistered_names: set[str] = set()


def bounded_span_name(name: str) -> str:
    """Return the span name of an unregistered range: `name`, or `record_function` if there are
    already `MAX_UNREGISTERED_NAMES` others.
    """
    if name not in _unregistered_names:
        if len(_unregistered_names) >= MAX_UNREGISTERED_NAMES:
            return "record_function"
        _unregistered_names.add(name)
    return name


def clear_unregistered_names() -> None:
    """Forget the names that `bounded_span_name` has counted."""
    _unregistered_names.clear()


for _name, _description in _BUILT_IN.items():
    register_profiler_region(PREFIX + _name, _description)
