"""`diff` where only one program ties its weights, as after loading a checkpoint that holds a tied
tensor once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import otel_torch
from tests.support import recording_to

WORDS, WIDTH = 23, 16


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.ff = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ff(self.embed(tokens))


class Translator(nn.Module):
    """An encoder and a decoder beside an embedding that holds their weights and never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = Part(), Part()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(tokens) + self.decoder(tokens // 2)))


def translator(*untied: str, copied: bool = False) -> Translator:
    """Return the tied model, but for the `untied` owners: with weights of their own, or copies."""
    torch.manual_seed(0)
    model = Translator()
    nn.init.normal_(model.head.weight)
    for name in ("encoder.embed", "decoder.embed", "head"):
        owner = model.get_submodule(name)
        assert isinstance(owner.weight, Tensor)
        if name not in untied:
            owner.weight = model.shared.weight
        elif copied:
            owner.weight = nn.Parameter(model.shared.weight.detach().clone())
    return model


def record(path: Path, model: nn.Module) -> Path:
    with recording_to(path):
        model(torch.arange(WORDS)[None])
    return path


Found = tuple[str, str | None, str | None]


def compare(folder: Path, reference: nn.Module, port: nn.Module) -> list[Found]:
    """Return kind, reference's and port's module of all findings."""
    paths = record(folder / "reference.jsonl", reference), record(folder / "port.jsonl", port)
    introduced = otel_torch.diff(*paths).introduced
    return [(finding.kind, finding.module, finding.port_module) for finding in introduced]


@pytest.mark.parametrize(
    "untied",
    [("encoder.embed",), ("decoder.embed",), ("head",), ("encoder.embed", "decoder.embed")],
)
@pytest.mark.parametrize("tied", ["reference", "port"])
def test_other_weights_under_a_tied_name_are_named(
    tmp_path: Path, tied: str, untied: tuple[str, ...]
) -> None:
    programs = translator(), translator(*untied)
    findings = compare(tmp_path, *(programs if tied == "reference" else programs[::-1]))
    assert sorted(findings) == sorted(("weights", name, name) for name in untied)


@pytest.mark.parametrize("untied", [("head",), ("encoder.embed", "decoder.embed", "head")])
def test_equal_copies_match(tmp_path: Path, untied: tuple[str, ...]) -> None:
    assert compare(tmp_path, translator(), translator(*untied, copied=True)) == []


def test_a_tensor_tied_in_both_matches_under_other_names(tmp_path: Path) -> None:
    class Renamed(nn.Module):
        """The same program, with no name in common."""

        def __init__(self, model: Translator) -> None:
            super().__init__()
            self.table, self.source, self.target = model.shared, model.encoder, model.decoder
            self.words = model.head

        def forward(self, tokens: Tensor) -> Tensor:
            return self.words(torch.tanh(self.source(tokens) + self.target(tokens // 2)))

    assert compare(tmp_path, translator(), Renamed(translator())) == []
