"""Layouts of models over ranks, clean and with faults, what the first finding says of them, and how
right that is.

`hand` splits a model by hand, `library` by torch's own means, `mesh` over two dimensions of ranks
at once, `decoder` grouped queries over tensor and pipeline parallel ranks, `fused` weights that are
cut part by part, `experts` a mixture whose tokens are exchanged, and `calls` divides the calls of one
process. `trainings.py` has layouts of further programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from otel_torch.parity.diff import diff
from otel_torch.parity.finding import Finding, Report
from tests.support import PROGRAMS, run_python, run_ranks


@dataclass(frozen=True)
class Program:
    """A program that runs in one process or split over ranks.

    Attributes:
        capture: (options) -> what is recorded.
        alone: (options) -> those of the same model in one process.
        ranks: (options) -> how many there are.
        variables: What else is in the environment.
    """

    path: Path
    capture: Callable[[str], str]
    alone: Callable[[str], str]
    ranks: Callable[[str], int]
    variables: dict[str, str] = field(default_factory=dict)


# options of programs on a mesh that the model in one process does not have
_MESH = ("tensor", "context", "pipeline", "expert", "data", "balanced", "dealt")
_MESH += ("virtual", "sequence", "ring", "stage", "flat")
# options of `split_by_library.py` that it has, too
_IN_ONE_PROCESS = ("stages", "data_wrong_mean")


def _without(options: str, *dropped: str) -> str:
    """Return the options, except those that begin with one of these words."""
    return " ".join(option for option in options.split() if not option.startswith(dropped))


def _on_a_mesh(program: str, folder: Path = PROGRAMS, **variables: str) -> Program:
    return Program(
        folder / program,
        lambda options: "training",
        lambda options: _without(options, *_MESH),
        lambda options: math.prod(
            int(option.partition("=")[2])
            for option in options.split()
            if "=" in option and not option.startswith("virtual")
        ),
        variables,
    )


FRAMEWORKS = PROGRAMS.parent / "frameworks/programs"
_OF_FRAMEWORKS: dict[str, Any] = {
    "folder": FRAMEWORKS,
    "PYTHONPATH": str(FRAMEWORKS),
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}
PROGRAMS_BY_NAME = {
    "hand": Program(
        PROGRAMS / "hand_split.py",
        lambda options: "training" if "train" in options.split() else "parity",
        lambda options: options,
        lambda options: 2,
    ),
    "library": Program(
        PROGRAMS / "split_by_library.py",
        lambda options: "parity" if options == "stages" else "training",
        lambda options: options if options in _IN_ONE_PROCESS else "alone",
        lambda options: 2,
    ),
    "mesh": _on_a_mesh("split_on_a_mesh.py"),
    "decoder": _on_a_mesh("split_a_decoder.py"),
    "experts": _on_a_mesh("split_experts.py"),
    "llama": _on_a_mesh("split_a_llama.py"),
    "fused": _on_a_mesh("split_fused_weights.py"),
    "calls": _on_a_mesh("split_calls.py"),
    "torch": Program(
        PROGRAMS / "train_over_torch.py",
        lambda options: "training",
        lambda options: "",
        lambda options: 4 if options in ("fsdp1_hybrid", "fsdp2_hybrid", "fsdp2_tensor") else 2,
    ),
    "megatron": _on_a_mesh("megatron_layouts.py", **_OF_FRAMEWORKS),
    "deepspeed": replace(
        _on_a_mesh("deepspeed_layouts.py", **_OF_FRAMEWORKS), ranks=lambda options: 2
    ),
}

# program, options
CLEAN: tuple[tuple[str, str], ...] = (
    ("hand", ""),
    ("hand", "experts"),
    ("hand", "dropout"),
    ("hand", "fused train"),
    ("hand", "train"),
    ("hand", "sequence train"),
    ("library", "data"),
    ("library", "fsdp"),
    ("library", "tensor"),
    ("library", "sequence"),
    ("library", "stages"),
    ("mesh", "tensor=2 smooth"),
    ("mesh", "data=2 mtp"),
    ("mesh", "context=2"),
    ("mesh", "tensor=2 data=2"),
    ("mesh", "tensor=2 data=2 mixture"),
    ("mesh", "tensor=2 data=2 recompute"),
    ("mesh", "tensor=2 context=2"),
    ("mesh", "context=2 data=2"),
    ("mesh", "context=2 balanced"),
    ("mesh", "context=2 data=2 balanced"),
    ("mesh", "data=2 dealt"),
    ("decoder", "tensor=2 fused"),
    ("decoder", "tensor=4"),
    ("decoder", "tensor=2 padded"),
    ("decoder", "tensor=2 data=2 padded"),
    ("decoder", "tensor=2 pipeline=2 clip"),
    ("decoder", "tensor=2 pipeline=2 fused tied"),
    ("decoder", "pipeline=2 data=2"),
    ("fused", "tensor=2"),
    ("fused", "data=2"),
    ("experts", "expert=2"),
    ("experts", "expert=2 shared capacity"),
    ("experts", "expert=4"),
    ("calls", "data=2"),
    ("calls", "data=2 dealt"),
    ("calls", "data=4"),
    ("calls", "data=2 guidance"),
)


@dataclass(frozen=True)
class Expected:
    """What the first finding says.

    Attributes:
        rank, cause: None if the finding names none.
        rightness: `exact`; `place` if the truth has a rank or a cause that the finding lacks;
            `near` if the right place is a neighbor of this one.
    """

    module: str
    tensor: str
    phase: str
    rank: int | None
    cause: str | None
    rightness: str = field(default="exact", compare=False)

    @classmethod
    def of(cls, finding: Finding) -> Expected:
        """Return what a finding says."""
        return cls(
            finding.port_module,
            finding.port_tensor,
            finding.phase,
            finding.rank,
            finding.cause and finding.cause.kind,
        )


_DOWN, _PROJ, _UP = "blocks.0.mlp.down", "blocks.0.attention.proj", "blocks.1.mlp.up"
_Q, _V, _MESH_PROJ = (f"blocks.1.attention.{part}" for part in ("q", "v", "proj"))
_ROUTER = "blocks.1.mlp.router"
_ATTENTION, _GATE = "blocks.1.attention", "blocks.2.mlp.gate"
_MIXTURE = "blocks.1.mixture"
_EXPERTS = f"{_MIXTURE}.experts"
_POSITIONS = Expected("positions", "in[0]", "forward", 1, "another_ranks_part")

# program, options, fault -> what the first finding says
FAULTS: dict[tuple[str, str, str], Expected] = {
    ("hand", "", f"{_DOWN}:missing"): Expected(_DOWN, "out", "forward", 0, "partial_sum"),
    ("hand", "", f"{_PROJ}:missing"): Expected(_PROJ, "out", "forward", 0, "partial_sum"),
    ("hand", "fused", "blocks.1.mlp.down:missing"): Expected(
        "blocks.1.mlp.down", "out", "forward", 0, "partial_sum"
    ),
    ("hand", "", "embed:missing"): Expected("embed", "out", "forward", 0, "partial_sum"),
    ("hand", "", f"{_DOWN}:doubled"): Expected(_DOWN, "out", "forward", 0, "reduced_twice"),
    ("hand", "", f"{_DOWN}:bias_before"): Expected(_DOWN, "out", "forward", 0, "bias_on_each_rank"),
    ("hand", "", f"{_UP}:shard"): Expected(_UP, "param.weight", "forward", 1, "another_ranks_part"),
    ("hand", "", f"{_DOWN}:shards_swapped"): Expected(
        _DOWN, "param.weight", "forward", 0, "another_ranks_part"
    ),
    ("hand", "", "embed:rows"): Expected("embed", "out", "forward", 0, None),
    ("hand", "experts", "experts:offset"): Expected("blocks.0.mlp", "out", "forward", 0, None),
    ("hand", "dropout", "blocks.1:stream"): Expected(
        "blocks.1.dropout", "out", "forward", 0, "random_stream"
    ),
    ("hand", "sequence", f"{_DOWN}:swapped"): Expected(
        _DOWN, "out", "forward", 0, "another_ranks_part"
    ),
    ("hand", "sequence", f"{_PROJ}:doubled"): Expected(
        _PROJ, "out", "forward", 1, "another_ranks_part"
    ),
    ("hand", "train", f"{_UP}:backward"): Expected(_UP, "grad_in[0]", "backward", 0, "partial_sum"),
    ("hand", "train", "blocks.1.attention.k:backward"): Expected(
        "blocks.1.norm1", "grad", "backward", 0, "partial_sum"
    ),
    ("hand", "sequence train", "blocks.0.norm1.weight:unreduced"): Expected(
        "blocks.0.norm1", "param_grad.weight", "backward", 0, "partial_sum"
    ),
    ("hand", "sequence train", f"{_PROJ}.bias:unreduced"): Expected(
        _PROJ, "param_grad.bias", "backward", 0, "partial_sum"
    ),
    ("mesh", "tensor=2 smooth", "local_smoothing"): Expected("", "loss", "loss", 0, "ranks_differ"),
    ("mesh", "tensor=2", "gathered_logits"): Expected("", "loss", "loss", 0, "whole_as_part"),
    ("mesh", "data=2 mtp", "mtp_local_tokens"): Expected("", "loss", "loss", 0, "mean_of_means"),
    ("mesh", "tensor=2 data=2 recompute", "recompute_group"): Expected(
        "blocks.1.attention.q", "out", "recompute", 2, "another_ranks_part", "near"
    ),
    ("mesh", "tensor=2 data=2 mixture", "mask_group"): Expected(
        _ROUTER, "grad", "backward", None, None, "place"
    ),
    ("mesh", "tensor=2 data=2", f"{_Q}:another_group"): Expected(
        "blocks.1.norm1", "param_grad.bias", "backward", 0, "partial_sum", "near"
    ),
    ("mesh", "tensor=2 data=2", "embedding_group"): Expected(
        "blocks.0.attention.q", "out", "forward", 2, "another_ranks_part", "near"
    ),
    ("mesh", "tensor=2", "sink_norm"): Expected("", "param_grad", "backward", None, "scaled"),
    ("mesh", "context=2", "local_tokens"): Expected("", "loss", "loss", 0, "mean_of_means"),
    ("mesh", "tensor=2 mixture", "router_count"): Expected(
        _ROUTER, "grad", "backward", 0, None, "place"
    ),
    ("mesh", "context=2", "positions_from_0"): _POSITIONS,
    ("mesh", "context=2", "blocks.1.attention:missing_gather"): Expected(
        _MESH_PROJ, "in[0]", "forward", 1, None
    ),
    ("mesh", "context=2", "blocks.1.attention:local_mask"): Expected(
        _MESH_PROJ, "in[0]", "forward", 1, None
    ),
    ("mesh", "context=2", "blocks.1.attention:unreduced_keys"): Expected(
        _V, "grad", "backward", 0, None
    ),
    ("mesh", "context=2 balanced", "positions_from_0"): _POSITIONS,
    ("mesh", "context=2 balanced", "blocks.1.attention:local_mask"): Expected(
        _MESH_PROJ, "in[0]", "forward", None, None, "place"
    ),
    ("decoder", "tensor=2 pipeline=2", "blocks.3.mlp.down:missing"): Expected(
        "blocks.3.mlp.down", "out", "forward", 2, "partial_sum"
    ),
    ("decoder", "tensor=2 fused", "kv_exchanged"): Expected(
        f"{_ATTENTION}.qkv", "out", "forward", 1, "reordered"
    ),
    ("decoder", "tensor=2 pipeline=2 fused", "kv_exchanged"): Expected(
        f"{_ATTENTION}.proj", "in[0]", "forward", None, None, "near"
    ),
    ("decoder", "tensor=2 fused", "qkv_blocks"): Expected(
        f"{_ATTENTION}.qkv", "out", "forward", 0, "another_ranks_part"
    ),
    ("decoder", "tensor=4", "kv_heads"): Expected(
        "blocks.0.attention.proj", "in[0]", "forward", None, None, "near"
    ),
    ("decoder", "tensor=2", "gate_exchanged"): Expected(
        _GATE, "out", "forward", 0, "another_ranks_part"
    ),
    ("decoder", "tensor=2 pipeline=2", "gate_exchanged"): Expected(
        "blocks.2.mlp.down", "in[0]", "forward", None, None, "near"
    ),
    ("decoder", "pipeline=2", "layers_swapped"): Expected(
        "blocks.2.norm1", "param.weight", "forward", 1, "exchanged"
    ),
    ("decoder", "pipeline=2", "layer_offset"): Expected(
        "blocks.2.norm1", "param.weight", "forward", 1, "other_weight"
    ),
    ("decoder", "pipeline=2", "layer_overlap"): Expected(
        "blocks.2.norm1", "param.weight", "forward", 1, "other_weight"
    ),
    ("decoder", "pipeline=2", "gradient_doubled"): Expected(
        "blocks.1", "grad", "backward", 0, "scaled"
    ),
    ("decoder", "tensor=2", "offset"): Expected("embed", "out", "forward", 0, None),
    ("decoder", "pipeline=2", "microbatch_twice"): Expected("", "in[0]", "forward", 0, None),
    ("decoder", "pipeline=2 tied", "tied_unreduced"): Expected(
        "head", "param_grad.weight", "backward", 1, "untied"
    ),
    ("decoder", "pipeline=2 data=2", "undivided"): Expected(
        "", "param_grad", "backward", None, "scaled"
    ),
    ("decoder", "tensor=2 data=2", "another_group"): Expected(
        "", "param_grad", "backward", 0, "another_group"
    ),
    ("decoder", "data=2", "unreduced"): Expected(
        "blocks.1.norm2", "param_grad.weight", "backward", 0, "partial_sum"
    ),
    ("decoder", "pipeline=2 clip", "local_clip"): Expected(
        "", "param_grad", "backward", 0, "clipped_by_own_norm"
    ),
    ("decoder", "tensor=2", "stale_norm"): Expected(
        "blocks.1.norm1", "param.weight", "update", 1, "frozen"
    ),
    ("decoder", "tensor=2 padded", "padding"): Expected(
        "head", "param_grad.weight", "backward", None, None, "near"
    ),
    ("fused", "tensor=2", "gates"): Expected(
        "blocks.1.mixer", "param.gates", "forward", 1, "another_ranks_part"
    ),
    ("fused", "tensor=2", "local_variance"): Expected(
        "blocks.1.mixer.norm", "out", "forward", None, None, "place"
    ),
    ("fused", "tensor=2", "not_copied"): Expected(
        "blocks.1.norm", "grad", "backward", 0, "partial_sum"
    ),
    ("fused", "tensor=2", "frozen_norm"): Expected(
        "blocks.1.norm", "param.weight", "update", 1, "frozen"
    ),
    ("fused", "data=2", "skipped_update"): Expected(
        "embed", "param.weight", "update", 1, "frozen", "place"
    ),
    ("fused", "data=2", "flipped"): Expected("", "in[0]", "forward", 1, "other_inputs"),
    ("calls", "data=2", "divided_by_all"): Expected("", "param_grad", "backward", None, "scaled"),
    ("calls", "data=2", "unreduced"): Expected(
        "blocks.1.up", "param_grad.weight", "backward", 0, "partial_sum"
    ),
    ("calls", "data=2 dealt", "same_batch"): Expected("", "in[0]", "forward", 0, "other_inputs"),
    ("calls", "data=2 guidance", "exchanged"): Expected("", "in[0]", "forward", 0, None),
    ("calls", "data=2 guidance", "own_mixture"): Expected("", "in[0]", "forward", 1, None),
    ("calls", "data=2 guidance", "other_weight"): Expected(
        "blocks.1.up", "out", "forward", 1, None
    ),
    ("experts", "expert=2", "expert_weights"): Expected(
        f"{_EXPERTS}.2", "in[0]", "forward", 0, None, "place"
    ),
    ("experts", "expert=2", "expert_offset"): Expected(
        f"{_EXPERTS}.2", "in[0]", "forward", 1, None
    ),
    ("experts", "expert=2", "unnormalized"): Expected(_MIXTURE, "out[0]", "forward", 0, None),
    ("experts", "expert=2", "weights_of_ranks"): Expected(
        _MIXTURE, "out[0]", "forward", None, None, "place"
    ),
    ("experts", "expert=2", "not_sorted_back"): Expected(
        _MIXTURE, "out[0]", "forward", None, None, "place"
    ),
    ("experts", "expert=2 capacity", "local_capacity"): Expected(
        f"{_EXPERTS}.0", "in[0]", "forward", 0, None
    ),
    ("experts", "expert=2", "local_load"): Expected(
        f"{_MIXTURE}.router", "grad", "backward", 0, None
    ),
    ("experts", "expert=2", "auxiliary_per_rank"): Expected(
        f"{_MIXTURE}.router", "grad", "backward", 0, None
    ),
    ("experts", "expert=2", "router_unreduced"): Expected(
        f"{_MIXTURE}.router", "param_grad.weight", "backward", 0, "partial_sum"
    ),
    ("experts", "expert=2", "tokens_dropped"): Expected(
        _MIXTURE, "out[0]", "forward", None, None, "place"
    ),
    ("experts", "expert=2", "experts_averaged"): Expected(
        f"{_EXPERTS}.3.down", "param_grad.bias", "backward", 1, "gradients_mixed"
    ),
    ("experts", "expert=2", "experts_undivided"): Expected(
        f"{_EXPERTS}.3.down", "param_grad.bias", "backward", 1, "scaled"
    ),
}


class Recorder:
    """Compares one process with the ranks of a layout; a model in one process is recorded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, str], Path] = {}
        self._runs = 0

    def compare(self, name: str, options: str, *fault: str) -> Report:
        """Record a layout, with a fault if one is given, and compare it."""
        program = PROGRAMS_BY_NAME[name]
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir(parents=True)
        reference = self._reference(name, options)
        run_ranks(
            folder,
            program.path,
            *options.split(),
            *fault,
            ranks=program.ranks(options),
            OTEL_TORCH_CAPTURE=program.capture(options),
            OTEL_TORCH_JSONL=str(folder / "ranks/run.jsonl"),
            **program.variables,
        )
        return diff(reference, folder / "ranks")

    def _reference(self, name: str, options: str) -> Path:
        program = PROGRAMS_BY_NAME[name]
        alone = program.alone(options)
        if (name, alone) not in self._references:
            path = self._folder / f"reference{len(self._references)}.jsonl"
            run_python(
                self._folder,
                program.path,
                *alone.split(),
                OTEL_TORCH_CAPTURE=program.capture(options),
                OTEL_TORCH_JSONL=str(path),
                **program.variables,
            )
            self._references[name, alone] = path
        return self._references[name, alone]
