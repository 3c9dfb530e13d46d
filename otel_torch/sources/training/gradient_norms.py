"""The norms of the gradients with which an optimizer steps, in total and by module.

Where the program clips by norm, the total is the norm that it has computed; else one fused pass
over the gradients computes it. All norms are those before clipping: the norms of modules come from
what the program's clip has computed of each gradient, or else of gradients multiplied back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from otel_torch import torch_private
from otel_torch.sources.models.model import Model
from otel_torch.sources.steps.training_steps import TrainingStep
from otel_torch.sources.tensors.parameter_data import gradient_of
from otel_torch.sources.training.gradient_clipping import Clip, ClipWatch
from otel_torch.sources.training.owned_parameters import (
    OwnedTensors,
    ParameterOwners,
    say_incomplete,
)
from otel_torch.sources.training.training_rows import TrainingRows
from otel_torch.statistics.norms import in_order, squared_norms, sums_of_parts
from otel_torch.statistics.reduce import widest


class GradientNorms:
    """Records gradient norms for one session."""

    def __init__(self, rows: TrainingRows, owners: ParameterOwners, clips: ClipWatch) -> None:
        self._rows, self._owners, self._clips = rows, owners, clips

    @torch_private.unobserved
    def record(
        self,
        model: Model,
        parameter_ids: frozenset[int],
        step: TrainingStep,
        scale: Tensor | None,
        are_elsewhere: bool,
    ) -> None:
        """Record the norms of the gradients of the parameters.

        Args:
            scale: by what the gradients are multiplied until the optimizer divides by it.
            are_elsewhere: whether other ranks may have gradients that this one has not.
        """
        parameter_ids &= model.parameter_ids()
        clips = self._clips.of(parameter_ids)
        whole = self._clip_of_all(model, parameter_ids, clips)
        labels: list[tuple[str, str]] = []
        numbers: list[Tensor] = []
        if whole is not None and not whole.is_recorded:
            numbers = _norms_of(whole, scale)
            labels = _labels("grad_norm", "grad_norm_clipped")[: len(numbers)]
        if whole is None or self._rows.are_detailed(step):
            owned = self._owners.tensors(model, parameter_ids, gradient_of)
            if are_elsewhere and len(owned.tensors) < len(parameter_ids):
                owned.is_complete = False
            if not owned.is_complete:
                say_incomplete(model, "gradient norm" + " by module" * (whole is not None))
            elif owned.tensors:
                self._add_measured(owned, clips, scale, step, whole is None, labels, numbers)
        if whole is not None:
            whole.is_recorded = True
        if numbers:
            self._rows.add_numbers(model, step, labels, torch.stack(numbers))

    def _clip_of_all(
        self, model: Model, parameter_ids: frozenset[int], clips: list[Clip]
    ) -> Clip | None:
        """Return the only clip of the parameters, if it has the L2 norm of all of them."""
        if len(clips) != 1 or clips[0].norm is None or not clips[0].is_l2:
            return None
        left = parameter_ids - clips[0].parameter_ids
        if left and self._owners.tensors(model, left, gradient_of).tensors:
            return None
        return clips[0]

    def _add_measured(
        self,
        owned: OwnedTensors,
        clips: list[Clip],
        scale: Tensor | None,
        step: TrainingStep,
        has_total: bool,
        labels: list[tuple[str, str]],
        numbers: list[Tensor],
    ) -> None:
        """Measure the gradients, and add what this tells to the labels and their numbers."""
        if has_total:
            clipped = _measured_squares(owned.tensors, scale)
            squares = _before_clipping(clipped, owned.parameter_ids, clips)
            labels += _labels("grad_norm")
            numbers.append(squares.sum().sqrt())
            if clips:
                labels += _labels("grad_norm_clipped")
                numbers.append(clipped.sum().sqrt())
        else:
            squares = _squares_by_clip(owned, clips[0], scale)
        if self._rows.are_detailed(step):
            by_module = sums_of_parts(squares, [count for _, count in owned.modules]).sqrt()
            for index, (module, _) in enumerate(owned.modules):
                if module and self._rows.has_module(module):
                    labels.append((module, "grad_norm"))
                    numbers.append(by_module[index])


def _labels(*names: str) -> list[tuple[str, str]]:
    return [("", name) for name in names]


def _norms_of(clip: Clip, scale: Tensor | None) -> list[Tensor]:
    """Return the norm before and after clipping; one where the limit is infinite."""
    norm, factor = clip.norm, clip.factor()
    assert norm is not None and factor is not None
    before = _unscaled(norm.to(widest(norm.device)), clip, scale)
    return [before, before * factor] if math.isfinite(clip.max_norm) else [before]


def _unscaled(norms: Tensor, clip: Clip, scale: Tensor | None) -> Tensor:
    """Return norms that a clip has computed, without the scale of the gradients."""
    scale = clip.scale if scale is None else scale
    return norms if scale is None else norms / scale.to(norms.device)


def _measured_squares(tensors: Sequence[Tensor], scale: Tensor | None) -> Tensor:
    """Return the sums of squares of gradients as they are now, but without their scale."""
    squares = squared_norms(tensors)
    return squares if scale is None else squares / scale.to(squares.device, squares.dtype).square()


def _squares_by_clip(owned: OwnedTensors, clip: Clip, scale: Tensor | None) -> Tensor:
    """Return the sums of squares before the only clip: by its norms, where it has computed them."""
    known, left = list[int](), list[int]()
    for index, tensor in enumerate(owned.tensors):
        (known if id(tensor) in clip.each else left).append(index)
    parts = []
    if known:
        norms = torch.stack([clip.each[id(owned.tensors[index])][1] for index in known])
        parts.append(_unscaled(norms.to(widest(norms.device)), clip, scale).square())
    if left:
        squares = _measured_squares([owned.tensors[index] for index in left], scale)
        keys = [owned.parameter_ids[index] for index in left]
        squares = _before_clipping(squares, keys, [clip])
        parts.append(squares.to(parts[0].device) if parts else squares)
    return in_order(parts, [indices for indices in (known, left) if indices])


def _before_clipping(squares: Tensor, parameter_ids: list[int], clips: list[Clip]) -> Tensor:
    """Return the sums of squares as they were before the program clipped the gradients."""
    for clip in clips:
        factor = clip.factor()
        if factor is None:
            continue
        original = squares / factor.to(squares.device, squares.dtype, non_blocking=True).square()
        is_clipped = [key in clip.parameter_ids for key in parameter_ids]
        if all(is_clipped):
            squares = original
        else:
            mask = torch.tensor(is_clipped, device="cpu").to(squares.device, non_blocking=True)
            squares = torch.where(mask, original, squares)
    return squares
