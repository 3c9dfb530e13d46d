"""Which modules of a framework's program are recorded, under which names, with which gradients."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from otel_torch.sources.modules.module_names import wraps_any_module
from tests.frameworks.runs import distinct, record

pytestmark = pytest.mark.frameworks


def test_modules_that_return_tensordicts_have_records(tmp_path: Path) -> None:
    run = record(tmp_path, "tensordicts.py")
    outputs = [row for row in run.rows if row["tensor"].startswith("out")]
    assert set(distinct(outputs, "model")) == {
        "ClipPPOLoss", "GAE", "ProbabilisticActor", "TensorDictSequential", "ValueOperator",
    }  # fmt: skip
    losses = [row["tensor"] for row in outputs if row["model"] == "ClipPPOLoss"]
    assert {"out.loss_objective", "out.loss_critic", "out.loss_entropy"} <= set(losses)
    nested = [row["step"] for row in outputs if row["tensor"] == "out.next.state_value"]
    assert set(nested) == {0, 1, 2, 3}
    assert not any("not_walked" in message for message in run.messages)


def test_lightning_steps_with_the_gradients_that_are_recorded(tmp_path: Path) -> None:
    """Lightning gives `step` a closure, which accumulates and clips."""
    run = record(
        tmp_path, "trainers/lightning_closure.py", OTEL_TORCH_CAPTURE="gradients,parameters"
    )
    used = [line.split()[2:] for line in run.output.splitlines() if "CHECK used" in line]
    recorded = [
        (row["step"], row["call"], row["abs_mean"])
        for row in run.rows
        if row["tensor"] == "param_grad.weight"
    ]
    assert recorded == [
        (int(step), 0, pytest.approx(float.fromhex(magnitude), rel=1e-5))
        for step, magnitude in used
    ]
    assert len(used) == 4


def test_layers_of_a_keras_model_are_its_modules(tmp_path: Path) -> None:
    """Of the functional model inside and of a list, which torch does not know."""
    run = record(tmp_path, "trainers/keras_fit.py", OTEL_TORCH_CAPTURE="outputs")
    modules = {row["module"] for row in run.rows if row["tensor"] == "out"}
    inner = ("batch_normalization", "conv2d", "dropout", "flatten")
    assert modules == {"", "features", "dense", "dense_1", "head"} | {
        f"features.{n}" for n in inner
    }
    assert distinct(run.rows, "model") == ["Classifier"]


def test_wrappers_and_adapters_keep_the_names_of_what_they_wrap(tmp_path: Path) -> None:
    run = record(tmp_path, "wrappers.py", OTEL_TORCH_CAPTURE="outputs")
    modules = distinct(run.rows, "model", "module")
    layer = "model.layers.0.self_attn"
    assert {
        ("LlamaForCausalLM", ""),
        ("LlamaForCausalLM", f"{layer}.q_proj"),
        ("LlamaForCausalLM", f"{layer}.q_proj.base_layer"),
        ("LlamaForCausalLM", f"{layer}.q_proj.lora_A.default"),
        ("LlamaForCausalLM", f"{layer}.k_proj"),
        ("Sequential", ""),
        ("Sequential", "0"),
        ("Sequential#2", ""),
        ("Sequential#2", "0"),
    } <= set(modules)
    assert {model for model, _ in modules} == {"LlamaForCausalLM", "Sequential", "Sequential#2"}
    assert not [name for _, name in modules if name.startswith(("base_model", "module", "_"))]


@pytest.mark.parametrize(
    ("library", "wrapper", "child"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine", "module"),
        ("megatron.core.distributed", "DistributedDataParallel", "module"),
        ("megatron.core.transformer.module", "Float16Module", "module"),
        ("peft", "PeftModelForSequenceClassification", "base_model"),
        ("peft.tuners.lora", "LoraModel", "model"),
        ("timm.utils", "ModelEmaV2", "module"),
    ],
)
def test_classes_that_wrap_any_module_are_recognized(
    library: str, wrapper: str, child: str
) -> None:
    assert wraps_any_module(getattr(importlib.import_module(library), wrapper), child)


@pytest.mark.parametrize(
    ("library", "model", "child"),
    [
        ("lightning", "LightningModule", "net"),
        ("tensordict.nn", "TensorDictModule", "module"),
        ("transformers", "CLIPTextModel", "text_model"),
        ("transformers", "CLIPVisionModel", "vision_model"),
        ("transformers", "T5EncoderModel", "encoder"),
    ],
)
def test_models_with_one_child_are_no_wrappers(library: str, model: str, child: str) -> None:
    assert not wraps_any_module(getattr(importlib.import_module(library), model), child)
