"""A reference and its port in lockstep: the first fault with its tensors, or all independent ones in
a single run.
"""

import gc

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import otel_torch
from otel_torch import lockstep
from otel_torch.capture.interleaving.interleaved_model import InterleavedModel
from otel_torch.capture.interleaving.interleaved_run import InterleavedRun
from otel_torch.capture.interleaving.lockstep import Lockstep, _LockstepComparison
from otel_torch.capture.interleaving.lockstep_events import PairedEvent, TensorLocation
from otel_torch.parity.tolerance import Tolerance
from tests.parity.small_models import WIDTH, Port, Reference, port_of, reference
from tests.support import recording

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def pair() -> tuple[Reference, Port]:
    model = reference()
    return model, port_of(model)


def test_a_clean_port_has_no_fault() -> None:
    reference, port = pair()
    outcome = lockstep(reference, port, X)
    assert (
        outcome.faults == []
        and outcome.compared > 40
        and torch.allclose(outcome.result, reference(X), atol=1e-5)
    )
    assert str(outcome).startswith("no fault\n")


def test_it_stops_at_the_first_fault_with_both_tensors() -> None:
    reference, port = pair()
    port.layers[1].residual_scale = 0.9
    (fault,) = lockstep(reference, port, X).faults
    # the input of the norm is wrong: the code between the modules computed it
    assert (fault.module, fault.tensor, fault.kind, fault.reference_module) == (
        "body.layers.1.post_norm",
        "in[0]",
        "input",
        "blocks.1.norm2",
    )
    assert fault.error > 100 * fault.limit
    assert fault.reference.shape == fault.port.shape == (2, 5, WIDTH)
    seen = []
    reference.blocks[1].norm2.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0])
    )
    reference(X)
    assert torch.allclose(fault.reference, seen[0], atol=1e-5)
    place = "body.layers.1.post_norm (blocks.1.norm2 of the reference), in[0], call 0"
    assert f"{place}: computed by code before this module" in str(fault)


def test_healed_it_lists_every_independent_fault_once() -> None:
    reference, port = pair()
    port.layers[2].self_attn.exchange = True
    with torch.no_grad():
        port.layers[0].mlp[0].weight *= 1.1
        port.lm_head.bias += 0.1
    exact = reference(X)
    outcome = lockstep(reference, port, (X,), heal=True)
    assert [(fault.module, fault.kind) for fault in outcome.faults] == [
        ("body.layers.0.mlp.0", "output"), ("body.layers.2.self_attn.o_proj", "input"), ("lm_head", "output"),
    ]  # fmt: skip
    assert torch.allclose(outcome.result, exact, atol=1e-5)


def test_a_fault_in_a_fused_projection_lists_the_modules_that_were_not_compared() -> None:
    reference, port = pair()
    with torch.no_grad():
        port.layers[1].self_attn.qkv_proj.weight[WIDTH + 4] *= 1.5
        port.layers[2].mlp[0].weight[3] *= 1.5
    fused, plain = lockstep(reference, port, X, heal=True).faults
    whole = "body.layers.1.self_attn.qkv_proj"
    assert (fused.module, fused.kind, fused.unmet) == (
        "body.layers.1.self_attn.o_proj",
        "input",
        [whole],
    )
    assert str(fused).endswith(f"; not compared since the last match: {whole}")
    assert (plain.module, plain.kind, plain.unmet) == ("body.layers.2.mlp.0", "output", [])


def test_a_port_may_take_other_inputs() -> None:
    reference, port = pair()
    outcome = lockstep(reference, port, (X,), port_inputs=lambda model: model(hidden=X.clone()))
    assert outcome.faults == []


def test_a_tensor_of_the_reference_may_correspond_to_distant_ones_of_the_port() -> None:
    reference = nn.Sequential(*[nn.Identity() for _ in range(12)])
    port = nn.Sequential(*[nn.Identity() for _ in range(12)])
    # the output of the reference's first module is that of the port's first and last
    modules = [("0" if index in (0, 11) else str(index)) for index in range(12)]
    events = [
        PairedEvent(str(i), "output", 0, {"out": TensorLocation(module, "output", 0, "out")}, [])
        for i, module in enumerate(modules)
    ]
    runs = [InterleavedRun(InterleavedModel(model), model, (X,), {}) for model in (reference, port)]
    outcome = _LockstepComparison(Tolerance(), True, Lockstep()).run(*runs, events)
    assert outcome.faults == [] and outcome.compared == 12


def test_a_real_model_and_a_planted_bug() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_head=2, n_embd=32, vocab_size=50)
    reference = GPT2LMHeadModel(config).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.2)
    port = GPT2LMHeadModel(config).eval()
    port.load_state_dict(reference.state_dict())
    port.transformer.h[1].mlp.act = nn.GELU()
    outcome = lockstep(reference, port, {"input_ids": torch.tensor([[1, 2, 3, 4]])}, heal=True)
    assert [fault.module for fault in outcome.faults][:1] == ["transformer.h.1.mlp.act"]
    assert len({fault.module.split(".")[2] for fault in outcome.faults}) == 1


def test_errors_are_clear() -> None:
    reference, port = pair()
    with pytest.raises(ValueError, match="nothing "):
        lockstep(
            reference, nn.Sequential(nn.Linear(3, 3), nn.Tanh()), X, port_inputs=torch.ones(2, 3)
        )
    with recording(), pytest.raises(RuntimeError, match=r"call otel_torch\.stop\(\) first"):
        lockstep(reference, port, X)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        lockstep(reference, port, torch.ones(2, 5))


def test_no_hook_remains_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    reference, port = pair()
    for _ in range(3):
        lockstep(reference, port, X)
    assert capsys.readouterr().err == ""
    gc.collect()
    for module in (*reference.modules(), *port.modules()):
        assert not (module._forward_hooks or module._forward_pre_hooks)
        assert otel_torch.ModuleHookManager.get_from(module) is None
