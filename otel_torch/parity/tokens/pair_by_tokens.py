"""Pair the forwards of two runs by their tokens, where their batches differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from otel_torch.parity.finding import LogProbabilities
from otel_torch.parity.forwards import ForwardRows
from otel_torch.parity.modules import ModulePath
from otel_torch.parity.program_match import ProgramMatch
from otel_torch.parity.sides import Sides
from otel_torch.parity.tokens.log_probabilities import compare_log_probabilities
from otel_torch.parity.tokens.merge import merge_forwards
from otel_torch.parity.tokens.requests import (
    MatchedToken,
    TokenForward,
    count_unmatched,
    know_updates,
    match_tokens,
    read_tokens,
)
from otel_torch.recording.row_batches import RowKinds

# of either run, which bounds what is in memory: a token has some kilobytes of sketches
MOST_TOKENS = 4096


@dataclass(slots=True)
class TokenPairs:
    """Forwards of two runs, merged so that both have the same tokens.

    pairs: one for each model. tokens: those of each pair. log_probabilities: of each model that
    computes logits. warnings: how. uncompared: what a run computed and is not compared.
    """

    pairs: list[Sides[ForwardRows]] = field(default_factory=list)
    tokens: dict[str, list[MatchedToken]] = field(default_factory=dict)
    log_probabilities: dict[str, LogProbabilities] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    uncompared: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _TokenSide:
    """The forwards of one run, up to `MOST_TOKENS` tokens."""

    read: list[ForwardRows] = field(default_factory=list)
    by_model: dict[str, list[TokenForward]] = field(default_factory=dict)
    is_whole: bool = True
    others: Counter[str] = field(default_factory=Counter)

    def batches(self, model: str) -> list[object]:
        return [forward.batch for forward in self.by_model.get(model, ())]


def pair_by_tokens(
    streams: Sides[Iterator[ForwardRows]],
    match: ProgramMatch,
    kinds: Sides[RowKinds],
    is_trained: Sides[Callable[[str], bool]],
    first_names: Sides[Mapping[ModulePath, ModulePath]],
) -> tuple[TokenPairs | None, Sides[Iterator[ForwardRows]]]:
    """Return the merged forwards, or None and the forwards as they are.

    None if the tokens of a run are not known, if both have the same batches, or no token in common.

    Args:
        kinds: Those of the rows, by side.
        is_trained: Whether the parameters of a model changed, by side.
        first_names: Those of shared modules, by their other names.
    """
    sides = streams.map(_read)
    rest: Sides[Iterator[ForwardRows]] = Sides(
        *(chain(side.read, stream) for side, stream in zip(sides, streams, strict=True))
    )
    paired = {
        model: port_model
        for model, port_model in match.models.items()
        if model in sides.reference.by_model and port_model in sides.port.by_model
    }
    if all(sides.reference.batches(m) == sides.port.batches(p) for m, p in paired.items()):
        return None, rest
    result = TokenPairs()
    for model, port_model in paired.items():
        forwards = Sides(sides.reference.by_model[model], sides.port.by_model[port_model])
        tokens = match_tokens(*forwards)
        if tokens:
            places = Sides(*([token.places[side] for token in tokens] for side in (0, 1)))
            result.pairs.append(merge_forwards(forwards, places, match.modules, kinds, first_names))
            result.tokens[model] = tokens
            log_probabilities = compare_log_probabilities(forwards, tokens)
            if log_probabilities is not None:
                result.log_probabilities[model] = log_probabilities
    if not result.pairs:
        return None, rest
    result.warnings = [_summary(result), *_updates_between(sides, paired, is_trained)]
    result.uncompared = list(_uncompared(sides, match.models, result))
    return result, rest


def _read(stream: Iterator[ForwardRows]) -> _TokenSide:
    side, count = _TokenSide(), 0
    for forward in stream:
        side.read.append(forward)
        tokens = read_tokens(forward)
        if tokens is None:
            side.others[forward.model] += 1
            if not side.by_model and len(side.read) > 1:
                break  # a run without tokens
            continue
        side.by_model.setdefault(forward.model, []).append(tokens)
        count += len(tokens.positions)
        if count >= MOST_TOKENS:
            side.is_whole = False
            break
    return side


def _updates_between(
    sides: Sides[_TokenSide], paired: Mapping[str, str], is_trained: Sides[Callable[[str], bool]]
) -> Iterator[str]:
    """Yield a warning for each model that computed tokens before and after an update.

    It is of no concern where both runs count their updates: their requests are told apart.
    """
    for reference, port in paired.items():
        if know_updates(sides.reference.by_model[reference], sides.port.by_model[port]):
            continue
        for side, model, trained in zip(sides, (reference, port), is_trained, strict=True):
            steps = {(tokens.rows.loop, tokens.rows.step) for tokens in side.by_model[model]}
            if trained(model) and len(steps) > 1:
                yield (
                    f"the parameters of {model} changed between its {len(steps)} steps, and equal "
                    "requests before and after an update may be taken for each other: record one "
                    "step of the training"
                )


def _summary(result: TokenPairs) -> str:
    count = sum(map(len, result.tokens.values()))
    requests = sum(len({token.request for token in tokens}) for tokens in result.tokens.values())
    return (
        "the programs batch their tokens differently: forwards were aligned by tokens, and "
        f"{count} tokens of {requests} requests compared"
    )


def _uncompared(
    sides: Sides[_TokenSide], models: Mapping[str, str], result: TokenPairs
) -> Iterator[str]:
    """Yield a line for what a run computed with a model of both, and is not compared."""
    for number, (name, side) in enumerate(zip(("reference", "port"), sides, strict=True)):
        if not side.is_whole:
            yield f"of the {name}, only the first {MOST_TOKENS} tokens were read"
        for reference, port in models.items():
            model = (reference, port)[number]
            places = [token.places[number] for token in result.tokens.get(reference, ())]
            left, count = count_unmatched(side.by_model.get(model, ()), places)
            if left:
                yield (
                    f"{left} of {count} tokens of {model or 'a model'} in the {name} have "
                    "no counterpart and were not compared"
                )
            if others := side.others[model]:
                yield (
                    f"{others} forwards of {model or 'a model'} in the {name} are of unknown "
                    "tokens and were not compared"
                )
