"""Which regions there are, and which of them were asked for.

A closed list let a misspelt region profile nothing, for ever, without a word: here every name that
FastVideo's code or documents know is registered, and what is not is told apart from what was left
out on purpose.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_torch.settings import Names

PREFIX = "profiler_region_"
# spans under names of their own; names beyond these share one span name, so that no backend drowns
# in them
MAX_OWN_NAMES = 100

# what FastVideo's code registers and what its documents list
_KNOWN = {
    "model_loading": "Loading of the pipeline's modules.",
    "inference_pre_denoising": "Conditioning and preparation before the denoising loop.",
    "inference_denoising": "The denoising loop.",
    "inference_post_denoising": "Decoding and everything else after the denoising loop.",
    "training_train": "The training loop as a whole.",
    "training_epoch": "One pass over the training data.",
    "training_step": "One training step.",
    "training_train_one_step": "One optimizer step with its forwards and backwards.",
    "training_dit": "The forward of the model in training.",
    "training_backward": "The backward pass.",
    "training_optimizer": "The optimizer's update.",
    "training_validation": "Validation during training.",
    "training_save_checkpoint": "Saving of a checkpoint.",
    "training_checkpoint_saving": "Saving of a checkpoint, by the name in FastVideo's documents.",
    "distillation_teacher_forward": "Forward of the teacher.",
    "distillation_student_forward": "Forward of the student.",
    "distillation_loss": "The distillation loss.",
    "distillation_update": "Parameter updates of a distillation.",
}
# one thing under two names, one in FastVideo's code and one in its documents: asking for either
# selects both
_SYNONYMS = {
    "profiler_region_training_save_checkpoint": "profiler_region_training_checkpoint_saving",
    "profiler_region_training_checkpoint_saving": "profiler_region_training_save_checkpoint",
}


@dataclass(frozen=True)
class ProfilerRegion:
    """A region's registered name, lower-case, and one sentence about it. Raises ValueError on any
    other name.
    """

    name: str
    description: str

    def __post_init__(self) -> None:
        if not self.name or self.name.strip() != self.name or not self.name.islower():
            raise ValueError(
                f"a region's name is lower-case without blanks around it, not {self.name!r}"
            )

    @property
    def short(self) -> str:
        """The name without `profiler_region_`."""
        return self.name.removeprefix(PREFIX)


_registered: dict[str, ProfilerRegion] = {}
# what others have concluded from a name as it was entered; emptied when another region is
# registered
derived: dict[str, Any] = {}
MAX_DERIVED = 4096


def normalise(name: str) -> str:
    """The form in which names are compared: lower-case, blanks around it dropped, those within it
    `_`.

    >>> normalise("  Model Loading ")
    'model_loading'
    """
    return "_".join(name.lower().split())


def register_profiler_region(name: str, description: str) -> None:
    """Make `name` a region, so that entering it opens a span.

    Raises ValueError for an empty name, and for one that is taken: the short and the long form are
    one name.
    """
    region = ProfilerRegion(normalise(name), description)
    for taken in (region.name, PREFIX + region.name, region.short):
        if taken in _registered:
            raise ValueError(f"region {name!r} is already registered, as {taken!r}")
    _registered[region.name] = region
    choose.cache_clear()
    derived.clear()


def resolve_profiler_region(name: str) -> ProfilerRegion | None:
    """The registered region of that name, long or short, in any case; None for an unknown one.

    >>> resolve_profiler_region(" Inference_Denoising").name
    'profiler_region_inference_denoising'
    """
    plain = normalise(name)
    return _registered.get(PREFIX + plain) or _registered.get(plain)


def list_profiler_regions() -> list[ProfilerRegion]:
    """All registered regions, sorted by name."""
    return [_registered[name] for name in sorted(_registered)]


def names_of(region: ProfilerRegion) -> tuple[str, ...]:
    """Every name by which a setting may ask for the region."""
    other = _SYNONYMS.get(region.name)
    return (region.name, region.short, *((other, other.removeprefix(PREFIX)) if other else ()))


def explain_unknown(name: str) -> str:
    """One line for a name that means nothing: what it was and what it may have been meant to be."""
    known = [form for region in list_profiler_regions() for form in (region.short, region.name)]
    close = difflib.get_close_matches(normalise(name), known, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"region {name!r} is not registered{meant}: it opens no span; "
        "register it with register_profiler_region, or name it in OTEL_TORCH_REGIONS"
    )


class Choice(NamedTuple):
    """What a name means under some settings. span: its span's name, None where none was asked for."""

    region: str
    span: str | None
    registered: bool


@functools.lru_cache(maxsize=4096)
def choose(name: str, wanted: Names, prefix: str) -> Choice:
    """What `name` means where `wanted` was asked for and registered regions' spans begin with
    `prefix`.
    """
    region = resolve_profiler_region(name)
    if region is None:
        return Choice(name, name if wanted.matches(name) else None, False)
    chosen = wanted.registered or wanted.matches(*names_of(region))
    return Choice(region.name, prefix + region.name if chosen else None, True)


_own_names: set[str] = set()


def bounded(name: str) -> str:
    """The span's name of a range that is not registered: its own, and `record_function` after a
    hundred distinct ones.
    """
    if name not in _own_names:
        if len(_own_names) >= MAX_OWN_NAMES:
            return "record_function"
        _own_names.add(name)
    return name


def forget_own_names() -> None:
    """Begin to count names for `bounded` anew."""
    _own_names.clear()


for _name, _description in _KNOWN.items():
    register_profiler_region(PREFIX + _name, _description)
