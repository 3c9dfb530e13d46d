"""Which tokens each forward computes: two engines' recordings are aligned by them.

A record of phase `tokens` stands before the records of an outermost forward. It says for each row
of the forward's tensors which token it is: its id (hashed), its position in its request, and the
request. A framework with a packed batch knows these and adds a source to `token_sources`:

    def packed_batch(module, args, kwargs):
        return Tokens(ids=runner.input_ids, positions=runner.positions, requests=runner.requests)

    token_sources.insert(0, packed_batch)

A record `logprobs` of this phase stands behind those of a module that returns logits: for each row
the likeliest next ids with their log-probabilities. Which one follows, a later forward says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from otel_torch.process.console import say_once
from otel_torch.records import TOKENS
from otel_torch.session import Session
from otel_torch.sources.events import RunEvents
from otel_torch.sources.models.model import Model
from otel_torch.sources.models.selection import ModuleSelection
from otel_torch.sources.modules.module_names import core
from otel_torch.sources.steps.forwards import ForwardContext, Inputs
from otel_torch.sources.steps.updates import OptimizerStep
from otel_torch.sources.steps.warm_ups import PHASE
from otel_torch.sources.tensors.tensor_reader import MeasuredTensor, RecordedCall
from otel_torch.sources.tensors.values import argument_names
from otel_torch.statistics.graph_capture import is_capturing
from otel_torch.statistics.row_layout import ROWS_MAX
from otel_torch.statistics.token_rows import NO_TOKEN, measure_log_probabilities, measure_tokens

Integers = Tensor | Sequence[int]

_NOT_OF_TOKENS = (PHASE, "recompute")  # phases in which no token is computed for the first time


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch, in the order of the rows of its tensors; None for what is unknown.

    ids: of the vocabulary. positions: index in the request, from 0, without paddings. requests: any
    number that tells the requests apart and stays the same from forward to forward, or the index in
    the batch. A padding has the position and the request -1. All have one shape: (tokens,) for a
    packed batch, (requests, tokens) for a padded one.
    """

    ids: Integers | None = None
    positions: Integers | None = None
    requests: Integers | None = None


# Asked in order, in the calling thread, at the start of every outermost forward, with the module
# that is called, its args and kwargs. The first that returns tokens wins. None may wait for a
# device.
token_sources: list[Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Tokens | None]] = []


class TokenObserver:
    """Records the tokens of every outermost forward of the selected models."""

    def __init__(self, session: Session, selection: ModuleSelection, events: RunEvents) -> None:
        self._session, self._selection = session, selection
        self._updates = 0  # of all optimizers: after one, an equal request gives other numbers
        events.optimizer_stepped.append(self._on_update)
        events.forward_began.append(self._on_forward)
        events.output_recorded.append(self._on_outputs)

    def _on_update(self, step: OptimizerStep) -> None:
        self._updates += 1

    def _on_forward(self, model: Model, context: ForwardContext, inputs: Inputs) -> None:
        is_wanted = context.recording and self._selection.has_model(model.name)
        is_dummy = context.phase == PHASE  # its step is no step of the program
        if inputs.module is None or is_dummy or not is_wanted or is_capturing():
            return
        try:
            tokens = _find(inputs.module, inputs.args, inputs.kwargs)
            if tokens is not None:
                self._record(model, context, tokens)
        except Exception as error:
            self._session.recorder.losses.count("record", "error")
            say_once(f"{model.name}: its tokens were not recorded: {type(error).__name__}: {error}")

    def _record(self, model: Model, context: ForwardContext, tokens: Tokens) -> None:
        measurement = measure_tokens(
            _as_tensor(tokens.ids),
            _as_tensor(tokens.positions),
            _as_tensor(tokens.requests),
            hashed=not self._session.settings.token_ids,
            updates=self._updates,
        )
        if measurement is None:
            return
        if measurement.numel > ROWS_MAX:
            say_once(
                f"{model.name}: a forward has {measurement.numel} tokens; the first {ROWS_MAX} "
                "are recorded one by one"
            )
        counts = model.calls.of(TOKENS, context.loop, context.step)
        number = model.calls.count(counts, "")
        call = RecordedCall(
            model.name,
            "",
            context.step,
            number,
            context.loop,
            TOKENS,
            context.branch,
            step_scope=context.active.scope,
        )
        self._session.recorder.add(MeasuredTensor(call, "tokens", measurement, time.time_ns()))

    def _on_outputs(self, call: RecordedCall, tensors: list[tuple[str, Tensor]]) -> None:
        logits = None if call.phase in _NOT_OF_TOKENS else _find_logits(call, tensors)
        if logits is None or is_capturing():
            return
        hashed = not self._session.settings.token_ids
        measurement = measure_log_probabilities(logits, hashed=hashed)
        of_tokens = replace(call, phase=TOKENS, inputs=frozenset())
        self._session.recorder.add(
            MeasuredTensor(of_tokens, "logprobs", measurement, time.time_ns())
        )


def _find_logits(call: RecordedCall, tensors: list[tuple[str, Tensor]]) -> Tensor | None:
    """Return the logits by the names that transformers and vLLM have made common, or None."""
    is_processor = call.class_name.endswith("LogitsProcessor")
    for label, tensor in tensors:
        if is_processor or (not call.module and label == "out.logits"):
            return tensor if tensor.is_floating_point() and tensor.dim() > 1 else None
    return None


def _find(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens | None:
    for source in (*token_sources, tokens_of_arguments):
        if (tokens := source(module, args, kwargs)) is not None:
            return tokens
    return None


def tokens_of_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tokens | None:
    """Return the tokens by the names of forward's arguments, which transformers has made common.

    >>> module = nn.Module()
    >>> ids, mask = torch.tensor([[0, 7, 8]]), torch.tensor([[0, 1, 1]])
    >>> tokens = tokens_of_arguments(module, (), {"input_ids": ids, "attention_mask": mask})
    >>> tokens.positions, tokens.requests
    (tensor([[-1,  0,  1]]), tensor([[-1,  0,  0]]))
    """
    # a wrapper, such as that of torch.compile, takes any arguments
    names = argument_names(core(module))
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if isinstance(ids, Tensor) and ids.dim() in (1, 2):
        shape, device = ids.shape, ids.device
    elif isinstance(embeddings, Tensor) and embeddings.dim() == 3:
        ids, shape, device = None, embeddings.shape[:2], embeddings.device
    else:
        return None
    if len(shape) == 1:
        positions = arguments.get("positions")
        is_packed = isinstance(positions, Tensor) and positions.shape == shape
        return Tokens(ids, positions if is_packed else None)
    positions = _positions(arguments, shape, device)
    requests = torch.arange(shape[0], device=device)[:, None].expand(shape)
    return Tokens(ids, positions, torch.where(positions < 0, NO_TOKEN, requests))


def _positions(arguments: Mapping[str, Any], shape: torch.Size, device: torch.device) -> Tensor:
    """Return the position of each token of a padded batch in its request.

    The mask and the cache come first, because the positions that a program computes may be what is
    wrong in it.
    """
    length = shape[1]
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
        is_token = mask != 0
        counted = is_token.cumsum(1) - 1
        return torch.where(is_token, counted, NO_TOKEN)[:, -length:].expand(shape)
    indices = torch.arange(length, device=device)
    # named `cache` by transformers from 5.24 on
    caches = (arguments.get(name) for name in ("cache", "past_key_values"))
    past_lengths = (getattr(cache, "get_seq_length", None) for cache in caches)
    past_length = next(filter(None, past_lengths), None)
    past: int | Tensor = 0 if past_length is None else past_length()
    sees_itself = _sees_itself(mask, shape, past)
    if sees_itself is not None:
        positions = _given_positions(arguments, shape)
        if positions is not None:
            return torch.where(sees_itself, positions, NO_TOKEN)
    if past_length is not None:
        return (indices + past).expand(shape)
    positions = _given_positions(arguments, shape)
    return indices.expand(shape) if positions is None else positions


def _sees_itself(mask: Any, shape: torch.Size, past: int | Tensor) -> Tensor | None:
    """Return which tokens are no paddings, by a mask with a row for each query; None without one.

    A static cache gets such masks, one for each kind of layer. A padding does not see its own key.
    It has no number of its own: how many keys a query sees is up to the window of its layer.
    """
    masks = mask.values() if isinstance(mask, Mapping) else [mask]
    by_query = [m for m in masks if isinstance(m, Tensor) and m.dim() == 4]
    if not by_query:
        return None
    widest = max(by_query, key=lambda m: m.shape[-1])
    batch, length = shape
    if widest.shape[0] not in (1, batch) or widest.shape[2] != length:
        return None
    queries = torch.arange(length, device=widest.device)
    keys = (queries + past).clamp(max=widest.shape[3] - 1)
    own = widest[:, 0, queries, keys]
    return (own if own.dtype == torch.bool else own == 0).expand(shape)


def _given_positions(arguments: Mapping[str, Any], shape: torch.Size) -> Tensor | None:
    for name in ("cache_position", "position_ids"):
        positions = arguments.get(name)
        if isinstance(positions, Tensor) and positions.shape[-1:] == shape[1:]:
            return positions.reshape(-1, shape[1]).expand(shape)
    return None


def _as_tensor(integers: Integers | None) -> Tensor | None:
    if integers is None or isinstance(integers, Tensor):
        return integers
    return torch.tensor(integers, dtype=torch.int64)
