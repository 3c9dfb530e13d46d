"""Records of a call: outputs, inputs, gradients and parameters, in every container."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support import PROGRAMS, ListSink, lines, recording, run_ranks

EVERYTHING = "inputs,outputs,gradients,parameters"


class Pair(NamedTuple):
    mean: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass
class Sample:
    sample: torch.Tensor
    pair: Pair
    note: str = "text"


class Returning(nn.Module):
    """Returns the result of a given function; its one parameter takes part."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self.weight * 2)


CONTAINERS = {
    "tensor": (lambda t: t, ["out"]),
    "tuple": (lambda t: (t, None, (t, 3)), ["out[0]", "out[2][0]"]),
    "list": (lambda t: [t, [t]], ["out[0]", "out[1][0]"]),
    "dict": (lambda t: {"a": t, "b": {"c": [t]}}, ["out.a", "out.b.c[0]"]),
    "ordered": (lambda t: OrderedDict(z=t, a=t), ["out.z", "out.a"]),
    "named_tuple": (lambda t: Pair(t, t), ["out.mean", "out.scale"]),
    "dataclass": (
        lambda t: Sample(t, Pair(t, t)),
        ["out.sample", "out.pair.mean", "out.pair.scale"],
    ),
    "nothing": (lambda t: None, []),
    "text": (lambda t: "text", []),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_are_found_in_every_container_with_their_gradients(kind: str) -> None:
    make, labels = CONTAINERS[kind]
    with recording(capture="outputs,gradients") as sink:
        output = Returning(lambda t: make(t))()
        leaves = [
            t
            for t in torch.utils._pytree.tree_leaves(
                output if not dataclasses.is_dataclass(output) else vars(output)
            )
            if torch.is_tensor(t)
        ]
        if leaves:
            sum(leaf.sum() for leaf in leaves).backward()
    assert sink.rows("tensor", phase="forward") == labels
    assert sorted(sink.rows("tensor", phase="backward")) == sorted(
        "grad" + label.removeprefix("out") for label in labels
    )


def test_outputs_of_transformers_and_diffusers_are_found() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    diffusers = pytest.importorskip("diffusers.models.modeling_outputs")
    with recording(capture="outputs,gradients") as sink:
        made = Returning(
            lambda t: outputs.CausalLMOutput(loss=t.sum(), logits=t, hidden_states=(t, t + 1))
        )()
        made.loss.backward()
        Returning(lambda t: diffusers.Transformer2DModelOutput(sample=t))()
    assert sink.rows("tensor", phase="forward") == [
        "out.loss",
        "out.logits",
        "out.hidden_states[0]",
        "out.hidden_states[1]",
        "out.sample",
    ]
    assert sink.rows("tensor", phase="backward") == [
        "grad.loss",
        "grad.logits",
        "grad.hidden_states[0]",
    ]


def test_inputs_go_by_their_place_or_their_keyword() -> None:
    with recording(capture="inputs") as sink:
        Returning(lambda t: t)(
            torch.ones(1), (torch.ones(2), 7), mask=torch.ones(3), config={"scale": torch.ones(4)}
        )
    assert sink.rows("tensor") == ["in[0]", "in[1][0]", "in.mask", "in.config.scale"]
    assert [stats["shape"] for stats in sink.rows("stats")] == [[1], [2], [3], [4]]


def test_numbers_are_those_at_the_time_of_the_call_whatever_is_changed_in_place_later() -> None:
    with recording(capture="inputs,outputs,gradients") as sink:
        net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(inplace=True))
        nn.init.constant_(net[0].weight, -1.0)
        (net(torch.ones(1, 2)) * 3.0).sum().backward()
    assert [stats["mean"] for stats in sink.rows("stats", module="0", tensor="out")] == [-2.0]
    assert [stats["mean"] for stats in sink.rows("stats", module="1", tensor="in[0]")] == [-2.0]
    assert [stats["mean"] for stats in sink.rows("stats", module="1", tensor="out")] == [0.0]
    # the gradient of the Linear's own output, which the ReLU has changed in place: nothing passes a
    # ReLU at -2
    assert [stats["mean"] for stats in sink.rows("stats", module="0", tensor="grad")] == [0.0]
    assert [stats["mean"] for stats in sink.rows("stats", module="1", tensor="grad")] == [3.0]


def test_a_sharded_tensor_is_measured_by_its_own_shard_without_asking_the_others(tmp_path) -> None:
    """Two ranks; only one of them records: a collective would hang."""
    program = PROGRAMS / "layouts/shard_inside_a_model.py"
    run_ranks(tmp_path, program, OTEL_TORCH_CAPTURE="inputs,outputs", OTEL_TORCH_JSONL_RANKS="1")
    (path,) = tmp_path.glob("run*.jsonl")
    rows = {(row["module"], row["tensor"]): row for row in lines(path)}
    assert (rows["inner", "out"]["mean"], rows["inner", "out"]["sum"]) == (10.0, 20.0)
    assert rows["inner", "in[0]"]["mean"] == 5.0 and rows["", "out"]["mean"] == 20.0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_parameters_are_read_once_right_before_the_first_forward_when_weights_are_loaded() -> None:
    with recording(capture="parameters") as sink:
        net = Tied()
        state = {name: torch.full_like(value, 7.0) for name, value in net.state_dict().items()}
        net.load_state_dict(state)
        for _ in range(2):
            net(torch.tensor([1, 2]))
            net.load_state_dict({name: value * 0 for name, value in state.items()})
    assert sink.rows("module", "tensor", "phase", "loop", "step", "call") == [
        (module, tensor, "attach", 0, 0, 0)
        for module, tensor in [
            ("embed", "param.weight"),
            ("head", "param.weight"),
            ("unused", "param.weight"),
            ("unused", "param.bias"),
        ]
    ]
    assert {stats["mean"] for stats in sink.rows("stats")} == {7.0}


def test_parameter_gradients_are_those_with_which_the_optimizer_steps() -> None:
    with recording(capture="parameters,gradients") as sink:
        net = nn.Linear(1, 1, bias=False)
        frozen = nn.Linear(1, 1).requires_grad_(False)
        optimizer = torch.optim.SGD([*net.parameters(), *frozen.parameters()], lr=0.0)
        for turn in range(2):
            for value in (1.0, 2.0):
                net(frozen(torch.full((1, 1), value)) * 0 + value).sum().backward()
            net.weight.grad.mul_(turn + 1)  # what clipping does
            optimizer.step()
            optimizer.zero_grad()
    assert [
        (step, stats["mean"])
        for step, stats in sink.rows("step", "stats", tensor="param_grad.weight")
    ] == [
        (0, 3.0),
        (1, 6.0),
    ]


def assert_keys_unique(sink: ListSink) -> None:
    counts = Counter(tuple(record.key().values()) for record in sink.records)
    assert [key for key, number in counts.items() if number > 1] == []
    assert sink.records


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*")
def test_a_causal_language_model_that_trains_and_generates_has_unique_keys() -> None:
    transformers = pytest.importorskip("transformers")
    with recording(capture=EVERYTHING) as sink:
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            eos_token_id=None,  # whatever the weights, three tokens are generated
        )
        model = transformers.LlamaForCausalLM(config)
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.arange(16).reshape(2, 8)
        for _ in range(2):
            model.train()
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert_keys_unique(sink)
    assert set(sink.rows("model")) == {"LlamaForCausalLM"}
    assert sink.rows("step", "call", "phase", module="model.norm", tensor="out") == [
        (0, 0, "forward"), (0, 1, "forward"), (1, 0, "eval"), (1, 1, "eval"), (1, 2, "eval"),
        (1, 0, "forward"), (1, 1, "forward"), (2, 0, "eval"), (2, 1, "eval"), (2, 2, "eval"),
    ]  # fmt: skip
    phases = {"forward", "eval", "backward", "attach", "recompute", "train"}
    assert phases == set(sink.rows("phase"))
    assert "grad.loss" in sink.rows("tensor") and "param_grad.weight" in sink.rows("tensor")


def test_an_encoder_decoder_has_unique_keys_though_its_embedding_is_shared() -> None:
    transformers = pytest.importorskip("transformers")
    with recording(capture=EVERYTHING) as sink:
        config = transformers.T5Config(
            vocab_size=32,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
        ids = torch.arange(8).reshape(1, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        model.generate(ids, max_new_tokens=3)
    assert_keys_unique(sink)
    names = set(sink.rows("module"))
    assert {"encoder", "decoder", "encoder.block.1", "decoder.block.1", "lm_head", ""} <= names


def test_denoising_has_unique_keys() -> None:
    diffusers = pytest.importorskip("diffusers")
    with recording(capture=EVERYTHING) as sink:
        unet = diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
            cross_attention_dim=8, attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        vae = diffusers.AutoencoderKL(
            block_out_channels=(8,),
            latent_channels=4,
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
        )
        scheduler = diffusers.DDIMScheduler()
        prompt = torch.ones(1, 3, 8)
        for _ in range(2):
            scheduler.set_timesteps(2)
            latents = torch.ones(1, 4, 8, 8)
            with torch.no_grad():
                for timestep in scheduler.timesteps:
                    noise = (
                        unet(latents, timestep, prompt).sample
                        - unet(latents, timestep, prompt * 0).sample
                    )
                    latents = scheduler.step(noise, timestep, latents).prev_sample
                vae.decode(latents)
    assert_keys_unique(sink)
    calls = sink.rows(
        "loop", "step", "call", model="UNet2DConditionModel", module="", tensor="out.sample"
    )
    assert calls == [(loop, step, call) for loop in (0, 1) for step in (0, 1) for call in (0, 1)]
    assert sink.rows("loop", "step", model="AutoencoderKL", module="decoder", tensor="out") == [
        (0, 0),
        (1, 1),
    ]
