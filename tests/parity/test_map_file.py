"""A user's map: it overrides the alignment, unused lines are reported, and an alignment can be
saved as a map.
"""

from __future__ import annotations

import json
import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from otel_torch.cli.main import main
from otel_torch.parity.call_graph import Parameter
from otel_torch.parity.diff import diff
from otel_torch.parity.fold_names import fold
from otel_torch.parity.layout import parse_layout
from otel_torch.parity.map_file import MapError, load_map
from otel_torch.parity.modules import ModulePairs
from otel_torch.parity.resolve_map import resolve_map
from tests.support import recording_to

# -- names that exist, without a recording
# ---------------------------------------------------------------------------------


@dataclass
class Names:
    modules: list
    parameters: list = field(default_factory=list)


def names(*modules, model="M", parameters=()):
    """Return a model's modules, root first, and parameters, as full names or (full name, tensor
    number).
    """
    parameters_made = []
    for entry in parameters:
        full, number = entry if isinstance(entry, tuple) else (entry, None)
        module, _, name = full.rpartition(".")
        row = {} if number is None else {"value": number}
        parameters_made.append(Parameter(model, module, name, row, None, None, (2,), 2, False))
    return Names([(model, ""), *((model, module) for module in modules)], parameters_made)


def both(*sides):
    """Put several models into one recording."""
    return Names(
        [place for side in sides for place in side.modules],
        [parameter for side in sides for parameter in side.parameters],
    )


def read(tmp_path, text):
    path = tmp_path / "map.toml"
    path.write_text(text)
    return load_map(path)


@pytest.fixture
def resolve(tmp_path):
    """Return a function that reads a map and resolves it for the names of two recordings."""
    return lambda text, reference, port: resolve_map(read(tmp_path, text), reference, port)


def plain(pairs):
    """Return the pairs of modules without their models."""
    return {reference[1]: port[1] for reference, port in pairs.items()}


def groups(resolved):
    return [
        (
            tuple(parameter.full_name for parameter in reference),
            tuple(parameter.full_name for parameter in port),
        )
        for reference, port in resolved.parameters
    ]


BLOCKS = [f"blocks.{index}" for index in range(3)]
# a map, the modules of both sides, and the pairs that it makes
PAIRED = {
    "a pattern carries over what it stands for": (
        '[modules]\n"blocks.*.attn1.to_q" = "layers.*.q"\n"text.**" = "model.text.**"',
        ["blocks", *(f"{block}.attn1.to_q" for block in BLOCKS), "text.proj.0"],
        ["layers", *(f"layers.{index}.q" for index in range(3)), "model.text.proj.0"],
        {f"{block}.attn1.to_q": f"layers.{index}.q" for index, block in enumerate(BLOCKS)}
        | {"text.proj.0": "model.text.proj.0"},
    ),
    "names need no quotes where TOML needs none": (
        "[modules]\nblocks.0.norm = 'blocks.0.ln'",
        ["blocks.0.norm"], ["blocks.0.ln"], {"blocks.0.norm": "blocks.0.ln"},
    ),
    "a line without a wildcard decides over one with it": (
        '[modules]\n"blocks.*" = "blocks.*"\n"blocks.0" = "first"',
        BLOCKS, [*BLOCKS, "first"],
        {"blocks.0": "first", "blocks.1": "blocks.1", "blocks.2": "blocks.2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRED)
def test_modules_are_paired_by_lines_and_patterns(resolve, case):
    text, reference, port, expected = PAIRED[case]
    resolved = resolve(text, names(*reference), names(*port))
    assert (plain(resolved.matched), resolved.warnings) == (expected, [])


def test_two_patterns_may_disagree_only_where_a_line_decides(resolve):
    text = '[modules]\n"blocks.*" = "blocks.*"\n"*.0" = "*.9"\n'
    reference, port = names(*BLOCKS), names(*BLOCKS, "blocks.9")
    with pytest.raises(
        MapError,
        match=r'contradicts \[modules\] "blocks.\*" = "blocks.\*" for blocks.0; a line without `\*`',
    ):
        resolve(text, reference, port)
    decided = resolve(text + '"blocks.0" = "blocks.9"', reference, port)
    assert plain(decided.matched)["blocks.0"] == "blocks.9"


def test_a_pair_of_modules_pairs_their_parameters(resolve):
    reference = names("norm", "norm2", parameters=["norm.weight", "norm.bias", "norm2.weight"])
    port = names("ln", "ln2", parameters=["ln.weight", "ln.gamma", "ln2.weight"])
    text = '[modules]\nnorm = "ln"\n[parameters]\n"norm.bias" = "ln.gamma"'
    assert sorted(groups(resolve(text, reference, port))) == [
        (("norm.bias",), ("ln.gamma",)),
        (("norm.weight",), ("ln.weight",)),
    ]


def test_a_parameter_with_two_names_is_paired_once(resolve):
    reference = names("embed", "head", parameters=[("embed.weight", 7), ("head.weight", 7)])
    port = names("tokens", "out", parameters=[("tokens.weight", 3), ("out.weight", 3)])
    resolved = resolve('[modules]\nembed = "tokens"\nhead = "out"', reference, port)
    assert groups(resolved) == [(("embed.weight",), ("tokens.weight",))]
    assert plain(resolved.matched) == {"embed": "tokens", "head": "out"}


@pytest.mark.parametrize("turned", [False, True])
def test_fused_modules_both_ways(resolve, turned):
    parts = [f"{block}.{part}" for block in BLOCKS for part in "qkv"]
    apart = names(*parts, parameters=[f"{part}.weight" for part in parts])
    whole = names(*(f"{b}.qkv" for b in BLOCKS), parameters=[f"{b}.qkv.weight" for b in BLOCKS])
    table = "reference" if turned else "port"
    text = f'[fused.{table}]\n"blocks.*.qkv" = ["blocks.*.q", "blocks.*.k", "blocks.*.v"]'
    resolved = resolve(text, *((whole, apart) if turned else (apart, whole)))
    made, empty = (resolved.wholes, resolved.parts) if turned else (resolved.parts, resolved.wholes)
    assert made["M", "blocks.1.qkv"] == [("M", f"blocks.1.{part}") for part in "qkv"]
    assert len(made) == 3 and not empty
    several, single = tuple(f"blocks.1.{part}.weight" for part in "qkv"), ("blocks.1.qkv.weight",)
    assert ((single, several) if turned else (several, single)) in groups(resolved)


def test_a_fused_parameter_of_parameters(resolve):
    reference = names("attn", parameters=["attn.in_proj_weight", "attn.in_proj_bias"])
    port = names(
        "attn",
        *(f"attn.{p}" for p in "qkv"),
        parameters=[f"attn.{p}.{n}" for p in "qkv" for n in ("weight", "bias")],
    )
    text = '[fused.reference]\n"attn.in_proj_weight" = ["attn.q.weight", "attn.k.weight", "attn.v.weight"]\n'
    text += '"attn.in_proj_bias" = ["attn.q.bias", "attn.k.bias", "attn.v.bias"]'
    resolved = resolve(text, reference, port)
    assert resolved.wholes == {("M", "attn"): [("M", f"attn.{part}") for part in "qkv"]}
    biases = ("attn.q.bias", "attn.k.bias", "attn.v.bias")
    assert (("attn.in_proj_bias",), biases) in groups(resolved)


def test_models(resolve):
    reference = both(names("blocks.0", model="Encoder"), names("blocks.0", model="Transformer"))
    port = both(names("blocks.0", model="T5"), names("blocks.0", "layers.0", model="DiT"))
    text = '[models]\nTransformer = "DiT"\nEncoder = "T5"\n[modules]\n"blocks.*" = "blocks.*"\n'
    resolved = resolve(text, reference, port)
    assert resolved.models == {"Transformer": "DiT", "Encoder": "T5"}
    assert resolved.matched[("Encoder", "blocks.0")] == ("T5", "blocks.0")
    assert resolved.matched[("Transformer", "blocks.0")] == ("DiT", "blocks.0")
    assert resolved.matched[("Encoder", "")] == ("T5", "")
    resolved = resolve(text + '"Transformer/blocks.0" = "DiT/layers.0"', reference, port)
    assert resolved.matched[("Transformer", "blocks.0")] == ("DiT", "layers.0")
    assert resolved.matched[("Encoder", "blocks.0")] == ("T5", "blocks.0")


def test_the_map_overrides_what_was_found(resolve):
    found = {"a": "x", "b": "y", "c": "z", "d": "w"}
    pairs = ModulePairs(
        matched={("M", name): ("M", port_name) for name, port_name in found.items()},
        parts={("M", "pq"): [("M", "p"), ("M", "q")]},
        containers={("M", "a"): ("M", "x")},
    )
    text = '[modules]\na = "y"\np = "p"\n[unpaired]\nreference = ["c"]\n'
    resolved = resolve(text, names(*"abcdpq"), names(*"xyzw", "pq", "p"))
    assert plain(resolved.apply(pairs).matched) == {"a": "y", "d": "w", "p": "p"}
    assert pairs.parts == {} and pairs.containers == {}
    assert resolved.forbids(0, ("M", "c"))
    assert not resolved.forbids(1, ("M", "c")) and not resolved.forbids(0, ("M", "d"))


def test_what_holds_others_and_owns_nothing_is_a_container(resolve):
    reference = names("blocks", "blocks.0", parameters=["blocks.0.weight"])
    text = '[modules]\nblocks = "layers"\n"blocks.0" = "layers.0"'
    resolved = resolve(text, reference, names("layers", "layers.0"))
    assert plain(resolved.apply(ModulePairs()).containers) == {"blocks": "layers"}


def test_layouts(resolve):
    resolved = resolve(
        '[layouts]\n"blocks.*.norm:out" = "permute(0, 2, 1)"\n"head:in[*]" = "reshape(4, -1)"',
        names("blocks.0.norm", "head"),
        names("other"),
    )
    norm, head = ("M", "blocks.0.norm"), ("M", "head")
    assert resolved.reorders(norm, "out") and not resolved.reorders(norm, "in[0]")
    assert str(resolved.layout(head, "in[3]")) == "reshape(4, -1)"
    assert not resolved.reorders(head, "in[0]")
    assert resolved.unused() == []


def test_a_layout_whose_tensor_never_came_is_said(resolve, tmp_path):
    resolved = resolve('[layouts]\n"head:out[7]" = "any"', names("head"), names("head"))
    resolved.layout(("M", "head"), "out[0]")
    assert resolved.unused() == [
        f'{tmp_path}/map.toml: [layouts] "head:out[7]" = "any": no such tensor was compared'
    ]


@pytest.mark.parametrize(
    "text, of_torch",
    [
        ("permute(0, 2, 1, 3)", lambda x: x.permute(0, 2, 1, 3)),
        ("transpose(1, -1)", lambda x: x.transpose(1, -1)),
        ("reshape(2, -1).transpose(0, 1)", lambda x: x.reshape(2, -1).transpose(0, 1)),
        (" reshape(6, 4, 5) . permute(2, 0, 1) ", lambda x: x.reshape(6, 4, 5).permute(2, 0, 1)),
    ],
)
def test_a_layout_means_what_torch_means(text, of_torch):
    tensor = torch.arange(120.0).reshape(2, 3, 4, 5)
    layout = parse_layout(text)
    assert np.array_equal(layout.apply(tensor.numpy()), of_torch(tensor).numpy())
    assert layout.shape(tuple(tensor.shape)) == tuple(of_torch(tensor).shape)
    assert (
        not layout.keeps_order
        and parse_layout("reshape(-1)").keeps_order
        and not parse_layout("any").keeps_order
    )


def test_a_layout_that_does_not_fit_is_a_value_error():
    for text, shape in [
        ("permute(1, 0)", (2, 3, 4)),
        ("transpose(0, 3)", (2, 2)),
        ("reshape(5, -1)", (2, 3)),
    ]:
        with pytest.raises(ValueError):
            parse_layout(text).shape(shape)


# -- maps that cannot be used
# ----------------------------------------------------------------------------------------------

NO_MAPS = {
    "no TOML": ("[modules\n", ["is not TOML", "line 1"]),
    "an unclosed name": ('[modules]\n"a" = "b\n', ["is not TOML", "line 2"]),
    "a name twice": ('[modules]\na = "b"\na = "c"\n', ["is not TOML", "line 3"]),
    "another schema": ('schema = "otel_torch.map/9"', ["'otel_torch.map/9'", "'otel_torch.map/1'"]),
    "an unknown table": (
        "[module]\n",
        ["[module]", "not a table of a map", 'did you mean "modules"?'],
    ),
    "no table": ('modules = "a"', ["modules is not a table"]),
    "a number": ("[modules]\na = 3\n", ['[modules] "a"', "3", "not a quoted name"]),
    "a list": (
        '[modules]\na = ["b", "c"]\n',
        ['[modules] "a"', "[fused.reference]", "[fused.port]"],
    ),
    "another number of wildcards": (
        '[modules]\n"a.*" = "b"\n',
        ['[modules] "a.*" = "b"', "carried over"],
    ),
    "a wildcard within": ('[modules]\n"a**" = "b**"\n', ['"a**"', "whole component"]),
    "no side": ('[fused]\na = ["b", "c"]\n', ["[fused]", "'a'"]),
    "no parts": (
        '[fused.port]\na = "b"\n',
        ['[fused.port] "a"', "list of its parts in the reference"],
    ),
    "one part": ('[fused.port]\na = ["b"]\n', ['[fused.port] "a"', "[modules]"]),
    "a part twice": ('[fused.port]\na = ["b", "b"]\n', ['[fused.port] "a"', "twice"]),
    "unpaired without a side": ('[unpaired]\nname = ["a"]\n', ["[unpaired]", "'name'"]),
    "unpaired without a list": ('[unpaired]\nport = "a"\n', ["[unpaired] port", "list"]),
    "no tensor": ('[layouts]\na = "any"\n', ['[layouts] "a"', "module:out"]),
    "no layout": (
        '[layouts]\n"a:out" = "sideways"\n',
        ['"a:out"', "'sideways' is not a layout", "permute"],
    ),
    "no order": ('[layouts]\n"a:out" = "permute(0, 2)"\n', ['"a:out"', "permute(0, 2)"]),
    "an unknown step": ('[layouts]\n"a:out" = "flip(0)"\n', ['"a:out"', "flip"]),
}


@pytest.mark.parametrize("case", NO_MAPS)
def test_what_is_no_map_is_one_line(tmp_path, case):
    text, expected = NO_MAPS[case]
    with pytest.raises(MapError) as error:
        read(tmp_path, text)
    line = str(error.value)
    assert line.startswith(f"{tmp_path}/map.toml: ") and "\n" not in line
    assert [words for words in expected if words not in line] == []


def test_bytes_are_no_map(tmp_path):
    (tmp_path / "map.toml").write_bytes(b"\xff\x00\x80")
    with pytest.raises(MapError, match="is not TOML"):
        load_map(tmp_path / "map.toml")


REFERENCE = names(
    "blocks",
    *BLOCKS,
    "blocks.0.attn",
    "blocks.1.attn",
    "norm",
    "q",
    "k",
    parameters=["norm.weight", "q.weight"],
)
PORT = names(
    "blocks", *BLOCKS, "blocks.0.self_attn", "ln", "qk", "v", parameters=["ln.weight", "qk.weight"]
)

MISFITS = {
    "no module here": (
        '[modules]\n"blocks.*.atn" = "x.*"',
        ["the reference has no module", '"blocks.*.atn"', '"blocks.*.attn"'],
    ),
    "no module there": (
        '[modules]\n"norm" = "lnn"',
        ['[modules] "norm" = "lnn"', 'the port has no module "lnn"', '"ln"'],
    ),
    "no module there, of a pattern": (
        '[modules]\n"blocks.*.attn" = "blocks.*.atn"',
        ['the port has no module "blocks.0.atn"'],
    ),
    "no parameter": (
        '[parameters]\n"norm.bias" = "ln.weight"',
        ["the reference has no parameter", '"norm.bias"'],
    ),
    "no part": (
        '[fused.port]\n"qk" = ["q", "z"]',
        ["[fused.port]", "the reference has no module or parameter", '"z"'],
    ),
    "no whole": (
        '[fused.port]\n"qkv" = ["q", "k"]',
        ["[fused.port]", "the port has no module or parameter", '"qk"'],
    ),
    "no model": ('[models]\n"M" = "N"', ["[models]", 'the port has no model "N"', "it has M"]),
    "unpaired": ('[unpaired]\nport = ["rope"]', ['[unpaired] "rope"', "the port has no module"]),
    "no layout's module": (
        '[layouts]\n"nor:out" = "any"',
        ["[layouts]", "the reference has no module", '"nor"'],
    ),
    "two of one": (
        '[modules]\n"q" = "qk"\n"k" = "qk"',
        ["q and k of the reference would both pair with qk", "[fused.port]"],
    ),
    "two of one, by a pattern": (
        '[modules]\n"blocks.*" = "blocks.*"\n"norm" = "blocks.1"',
        ["both pair with blocks.1"],
    ),
    "paired and not": (
        '[modules]\n"norm" = "ln"\n[unpaired]\nreference = ["norm"]',
        ["[modules]", "[unpaired]", "norm"],
    ),
    "paired and fused": (
        '[modules]\n"q" = "v"\n[fused.port]\n"qk" = ["q", "k"]',
        ["[modules]", "[fused.port]", "about q"],
    ),
    "a mixture": (
        '[fused.port]\n"qk" = ["q", "norm.weight"]',
        ["some of these are modules and some are parameters"],
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_the_recordings_is_one_line(resolve, tmp_path, case):
    text, expected = MISFITS[case]
    with pytest.raises(MapError) as error:
        resolve(text, REFERENCE, PORT)
    line = str(error.value)
    assert line.startswith(f"{tmp_path}/map.toml: ") and "\n" not in line
    assert [words for words in expected if words not in line] == []


def test_counterparts_that_a_pattern_does_not_find_are_said(resolve):
    resolved = resolve('[modules]\n"blocks.*.attn" = "blocks.*.self_attn"', REFERENCE, PORT)
    assert plain(resolved.matched) == {"blocks.0.attn": "blocks.0.self_attn"}
    (warning,) = resolved.warnings
    assert "the port has no counterpart of blocks.1.attn" in warning


def test_a_line_that_others_outdo_is_said(resolve, tmp_path):
    text = '[modules]\n"nor*" = "l*"\n"norm" = "ln"'
    resolved = resolve(text, names("norm"), names("ln", "lm"))
    assert resolved.warnings == [
        f'{tmp_path}/map.toml: [modules] "nor*" = "l*": has no effect, other lines override it'
    ]


# -- folding
# --------------------------------------------------------------------------------------------------


def test_fold_writes_only_what_means_the_same():
    rows = {f"a.{i}.q": (f"b.{i}.x",) for i in range(4)}
    there = [{f"b.{i}.x" for i in range(9)}]
    assert fold(rows, rows, there) == [("a.*.q", ("b.*.x",), list(rows))]
    # one that nothing was found for would be paired by the pattern
    assert len(fold(rows, [*rows, "a.7.q"], there)) == 4
    # but not where there is nothing that it could be paired with
    assert len(fold(rows, [*rows, "a.9.q"], there)) == 1


@pytest.mark.parametrize("seed", range(30))
def test_folded_pairs_are_the_same_pairs(resolve, seed):
    """Random programs: a saved map, when read, gives the same pairs."""
    chance = random.Random(seed)
    pairs, port_names = {}, set()
    for leaf in ("q", "k", "norm", "net.0", "net.2", "proj"):
        shift, renamed = chance.choice([0, 0, 0, 1]), chance.choice([leaf, f"{leaf}.inner", "fc"])
        for index in range(chance.choice([1, 2, 5])):
            name = f"blocks.{index}.{leaf}"
            port = f"layers.{index + shift}.{renamed}"
            if chance.random() < 0.15:
                port = f"layers.{index}.odd_{len(pairs)}"
            if chance.random() < 0.9 and port not in pairs.values():
                pairs[name] = port
            port_names.add(port)
    universe = list(
        dict.fromkeys(
            [*pairs, *(f"blocks.{i}.{leaf}" for i in range(5) for leaf in ("q", "net.0"))]
        )
    )
    text = "[modules]\n" + "".join(
        f"{json.dumps(name)} = {json.dumps(ports[0])}\n"
        for name, ports, _ in fold(
            {name: (port,) for name, port in pairs.items()}, universe, [port_names]
        )
    )
    assert plain(resolve(text, names(*universe), names(*port_names)).matched) == pairs


# -- recordings
# --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention whose parts have the given names: q, k, v, norm of q, out."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts
        for part in (*parts[:3], parts[4]):
            setattr(self, part, nn.Linear(8, 8))
        setattr(self, parts[3], nn.LayerNorm(2))

    def forward(self, x):
        q, k, v, norm, out = (getattr(self, part) for part in self.parts)
        heads = [projection(x).unflatten(-1, (4, 2)).transpose(1, 2) for projection in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(norm(heads[0]), *heads[1:])
        return out(mixed.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """The same attention with its three projections in one and the norm before the transposition."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.rms = nn.LayerNorm(2)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 2)) for part in self.qkv(x).chunk(3, dim=-1))
        heads = [part.transpose(1, 2) for part in (self.rms(q), k, v)]
        return self.proj(
            nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        )


class Block(nn.Module):
    def __init__(self, attention, names):
        super().__init__()
        self.names = names
        for name, made in zip(
            names, (nn.LayerNorm(8), attention, nn.LayerNorm(8), nn.Linear(8, 8)), strict=True
        ):
            setattr(self, name, made)

    def forward(self, x):
        first, attention, second, linear = (getattr(self, name) for name in self.names)
        x = x + attention(first(x))
        return x + linear(second(x))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(Attention(*"qkv", "norm_q", "out"), ("norm1", "attn", "norm2", "ff"))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Port(nn.Module):
    """A port with other names everywhere; its norms are all ones and their names do not tell them
    apart.
    """

    def __init__(self, reference, wrong=None):
        super().__init__()
        self.layers = nn.ModuleList(
            Block(Fused(), ("south", "mix", "north", "mlp")) for _ in range(3)
        )
        for layer, block in zip(self.layers, reference.blocks, strict=True):
            for name, reference_name in (("weight", "weight"), ("bias", "bias")):
                parts = [getattr(getattr(block.attn, part), reference_name) for part in "qkv"]
                setattr(layer.mix.qkv, name, nn.Parameter(torch.cat(parts).detach().clone()))
            for part, reference_part in ((layer.mix.proj, block.attn.out), (layer.mlp, block.ff)):
                part.load_state_dict(reference_part.state_dict())
        if wrong is not None:
            wrong(self)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def record(path, model):
    torch.manual_seed(1)
    with recording_to(path, signals="spans"):
        for _ in range(3):
            model(
                torch.randn(1, 4, 8)
            )  # as many tokens as heads: what changed places has the shape that it had
    return path


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    torch.manual_seed(0)
    reference = Reference()
    with torch.no_grad():
        for block in reference.blocks:
            block.attn.norm_q.weight.copy_(torch.randn(2))

    def scale(port):
        port.layers[1].mix.qkv.weight.data[8:16] *= 1.5

    def load_norm(port):
        for layer, block in zip(port.layers, reference.blocks, strict=True):
            layer.mix.rms.load_state_dict(block.attn.norm_q.state_dict())

    return {
        "reference": record(folder / "reference.jsonl", reference),
        "port": record(folder / "port.jsonl", Port(reference, load_norm)),
        "wrong": record(
            folder / "wrong.jsonl", Port(reference, lambda port: (load_norm(port), scale(port)))
        ),
    }


LAYOUT = """
[layouts]
"blocks.*.attn.norm_q:in*" = "permute(0, 2, 1, 3)"
"blocks.*.attn.norm_q:out" = "permute(0, 2, 1, 3)"
"""


def test_a_layout_says_that_another_order_is_right(recordings, tmp_path):
    without = diff(recordings["reference"], recordings["port"])
    (tmp_path / "map.toml").write_text(LAYOUT)
    report = diff(recordings["reference"], recordings["port"], map=tmp_path / "map.toml")
    assert report.verdict == "match"
    norms = [pair for pair in report.compared if pair.module.endswith("norm_q")]
    assert {pair.state for pair in norms} == {"layout"} and len(norms) >= 6
    assert {pair.step for pair in norms} >= {0, 1}
    before = {
        pair.state
        for pair in without.compared
        if pair.module.endswith("norm_q") and pair.tensor == "out"
    }
    assert "layout" not in before
    assert not [line for line in report.warnings if "map.toml" in line]


def test_what_cannot_be_told_apart_is_said_and_a_map_tells_it(recordings, tmp_path):
    report = diff(recordings["reference"], recordings["port"], save_map=tmp_path / "found.toml")
    assert {pair.module for pair in report.ambiguous} == {
        f"blocks.{i}.{norm}" for i in range(3) for norm in ("norm1", "norm2")
    }
    assert "ambiguous" in (tmp_path / "found.toml").read_text()
    (tmp_path / "map.toml").write_text(
        '[modules]\n"blocks.*.norm1" = "layers.*.south"\n"blocks.*.norm2" = "layers.*.north"'
        + LAYOUT
    )
    report = diff(recordings["reference"], recordings["port"], map=tmp_path / "map.toml")
    assert (report.verdict, report.ambiguous) == ("match", [])
    pairs = {(pair.module, pair.port_module) for pair in report.compared}
    assert {("blocks.2.norm1", "layers.2.south"), ("blocks.0.norm2", "layers.0.north")} <= pairs


def test_what_was_found_is_saved_and_means_the_same_when_given_back(recordings, tmp_path):
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    resolved = diff(recordings["reference"], recordings["port"], save_map=first)
    again = diff(recordings["reference"], recordings["port"], map=first, save_map=second)
    assert tomllib.loads(first.read_text()) == tomllib.loads(second.read_text())
    tables = tomllib.loads(first.read_text())
    assert tables["modules"]["blocks.*.attn.out"] == "layers.*.mix.proj"
    assert tables["fused"]["port"]["layers.*.mix.qkv"] == [
        "blocks.*.attn.q",
        "blocks.*.attn.k",
        "blocks.*.attn.v",
    ]
    assert (
        '"blocks.*.ff" = ' in first.read_text()
        and "3 modules, equal parameters" in first.read_text()
    )

    def compared(report):
        return {
            (pair.module, pair.tensor, pair.port_module, pair.port_tensor, pair.state)
            for pair in report.compared
        }

    assert compared(resolved) == compared(again)
    assert again.verdict == resolved.verdict
    assert [line for line in again.warnings if "toml" in line] == []


def test_what_a_map_keeps_apart_is_not_compared(recordings, tmp_path):
    (tmp_path / "map.toml").write_text(
        '[unpaired]\nreference = ["blocks.*.ff", "blocks.0.attn.**"]'
        + LAYOUT.replace("*", "[12]", 0)
    )
    report = diff(
        recordings["reference"],
        recordings["port"],
        map=tmp_path / "map.toml",
        save_map=tmp_path / "kept.toml",
    )
    apart = {f"blocks.{i}.ff" for i in range(3)} | {
        f"blocks.0.attn{rest}" for rest in ("", ".q", ".k", ".v", ".norm_q", ".out")
    }
    assert apart <= {pair.module for pair in report.unpaired["reference"]}
    assert not apart & {pair.module for pair in report.compared if pair.module}
    saved_map = tomllib.loads((tmp_path / "kept.toml").read_text())
    assert saved_map["unpaired"]["reference"] == ["blocks.*.ff", "blocks.0.attn.**"]
    assert len(saved_map["layouts"]) == 2


def test_a_fused_weight_that_is_wrong_is_compared_with_what_belongs_there(recordings, tmp_path):
    """No sum identifies its parts: only a map or the names of the other modules do."""
    (tmp_path / "map.toml").write_text(
        '[fused.port]\n"layers.*.mix.qkv" = ["blocks.*.attn.q", "blocks.*.attn.k", "blocks.*.attn.v"]'
        + LAYOUT
    )
    report = diff(recordings["reference"], recordings["wrong"], map=tmp_path / "map.toml")
    assert report.verdict == "diverged" and report.first is not None
    assert report.first.port_module == "layers.1.mix.qkv"
    assert report.first.module in {f"blocks.1.attn.{part}" for part in "qkv"}


def test_a_map_for_other_programs_is_one_line_and_status_2(recordings, tmp_path, capsys):
    (tmp_path / "map.toml").write_text('[modules]\n"blocks.*.atn" = "layers.*.mix"\n')
    paths = recordings["reference"], recordings["port"], "--map", tmp_path / "map.toml"
    status = main(["diff", *map(str, paths)])
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert (status, shown.out) == (2, "")
    assert (
        "map.toml: [modules]" in line
        and 'the reference has no module "blocks.*.atn"; did you mean "blocks.*.attn"?' in line
    )


def test_the_head_of_a_saved_map_survives_any_name(recordings, tmp_path):
    odd = tmp_path / 'a"b\nc.jsonl'
    odd.write_bytes(Path(recordings["reference"]).read_bytes())
    diff(odd, recordings["port"], save_map=tmp_path / "found.toml")
    assert load_map(tmp_path / "found.toml").modules
