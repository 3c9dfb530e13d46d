"""`scan` predicts a real run, and changes nothing."""

import dataclasses
import gc
import json
import os
import random
import sys
import threading
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from otel_torch import scan
from otel_torch.cli.main import main
from otel_torch.sources.modules.module_names import named_modules
from otel_torch.sources.tensors.values import walk
from tests.otlp_receiver import Receiver
from tests.support import in_terminal, recording, run_python

IDS = torch.tensor([[3, 1, 4, 1, 5]])
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 1,
}  # fmt: skip
TOKENS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = dict(
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    **TOKENS,
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OTEL_", "FASTVIDEO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv(
        "OTEL_TORCH_ENABLED", "0"
    )  # the command sets it for its process, which is the test's here


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, **TOKENS)), (IDS,), {}


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA)), (IDS,), {"attention_mask": torch.ones(1, 5)}


def build_mixture_of_experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **LLAMA)), (IDS,), {}


def build_t5_encoder():
    from transformers import T5Config, T5EncoderModel

    return (
        T5EncoderModel(
            T5Config(num_layers=1, d_model=32, d_ff=64, num_heads=2, d_kv=16, vocab_size=50)
        ),
        (IDS,),
        {},
    )


def build_wan():
    from diffusers import WanTransformer3DModel

    inputs = {
        "hidden_states": torch.ones(1, 4, 2, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.ones(1, 5, 16),
    }
    return WanTransformer3DModel(**WAN), (), inputs


def build_vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(block_out_channels=(32,), norm_num_groups=8), (torch.ones(1, 3, 8, 8),), {}


def build_unet():
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, cross_attention_dim=16,
        attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return unet, (torch.ones(2, 4, 8, 8), torch.tensor(500), torch.ones(2, 7, 16)), {}


MODELS = (
    build_gpt2,
    build_llama,
    build_mixture_of_experts,
    build_t5_encoder,
    build_wan,
    build_unet,
    build_vae,
)


def run_really(model, args, kwargs):
    """Return (module, class, [(label, shape, dtype) of the outputs]) of every call in order, and the
    operations.
    """
    calls, places = [], []

    def enter(module, args, name):
        places.append(len(calls))
        calls.append(None)

    def leave(module, args, output, name):
        outputs = [
            (label, tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for label, t in walk(output, "out")
        ]
        calls[places.pop()] = (name, type(module).__name__, outputs)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, name=name: enter(m, a, name)))
        handles.append(
            module.register_forward_hook(lambda m, a, o, name=name: leave(m, a, o, name))
        )
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return calls


def count_flops(model, args, kwargs):
    """Return the count of torch's own counter, with attention as the products that it consists of,
    because it does not count the CPU's attention operator.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops()


def outline(scanned):
    return [
        (call.module, call.class_name, [(v.label, v.shape, v.dtype) for v in call.outputs])
        for call in scanned.calls
    ]


@pytest.mark.parametrize("build", MODELS)
def test_a_scan_predicts_a_real_run(build):
    model, args, kwargs = build()
    model.eval()
    calls = run_really(model, args, kwargs)
    scanned = scan(model, *args, **kwargs)
    with torch.no_grad():
        assert scan(model, *args, **kwargs).flops == scanned.flops
    assert scanned.ended is None
    names = {id(module): name for name, module in reversed(named_modules(model))}
    first = {
        name: names[id(module)] for name, module in named_modules(model)
    }  # a shared module has several names
    assert [(first[name], *rest) for name, *rest in outline(scanned)] == calls
    assert [call.order for call in scanned.calls] == list(range(len(calls)))
    assert scanned.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert scanned.buffer_bytes == sum(b.nbytes for b in model.buffers())
    if build is not build_mixture_of_experts:  # torch's own counter does not count grouped products
        assert scanned.flops == count_flops(model, args, kwargs) > 0


@pytest.mark.parametrize("build", MODELS)
def test_no_weights_are_needed(build):
    model, args, kwargs = build()
    with torch.device("meta"):
        empty = (
            type(model)(model.config)
            if hasattr(model, "base_model_prefix")
            else type(model).from_config(model.config)
        )
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    scanned = scan(empty.train(model.training), *args, **kwargs)
    assert scanned == scan(model, *args, **kwargs)
    json.dumps(scanned.as_json(), allow_nan=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.linear = nn.LSTM(32, 64, 2), nn.GRU(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.linear(self.gru(self.lstm(x)[0])[0][0, 0])


@pytest.mark.parametrize("grad", [False, True])
def test_products_with_their_own_operators_are_counted(grad):
    model, x = Recurrent(), torch.ones(7, 3, 32)
    with torch.set_grad_enabled(grad):
        scanned = scan(model, x)
    assert [call.flops for call in scanned.calls] == [3_441_024, 2_408_448, 1_032_192, 384]
    q, k = (
        torch.empty(2, 8, 16, 32),
        torch.empty(2, 2, 24, 32),
    )  # fewer key heads than query heads
    attention = Calls(
        lambda q, k: nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    )
    with torch.set_grad_enabled(grad):
        assert scan(attention, q, k).flops == 2 * 2 * 8 * 16 * 24 * (32 + 32)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


GLOBAL = torch.zeros(3)


class Stateful(nn.Module):
    """A model that writes wherever a forward can write."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.loose = torch.zeros(3)
        self.history, self.count = [], 0
        self.cache = {"last": torch.zeros(3)}

    def forward(self, x):
        x = (
            nn.functional.dropout(self.linear(self.norm(x)), 0.5)
            + torch.rand(3)
            + random.random()
            + numpy.random.rand()
        )
        torch.manual_seed(0)
        self.seen.add_(1)
        self.loose.add_(1)
        self.cache["last"].add_(1)
        GLOBAL.add_(1)
        with torch.no_grad():
            self.linear.weight.zero_()
        self.history.append(x)
        self.count += 1
        self.eval()
        torch.set_default_dtype(torch.float64)
        return x


def test_nothing_is_changed():
    model = Stateful()
    fired = []
    model.register_forward_hook(lambda *args: fired.append("after"))
    model.linear.register_forward_pre_hook(lambda *args: fired.append("before"))
    x = torch.ones(2, 3, requires_grad=True)

    def everything():
        tensors = {
            **model.state_dict(keep_vars=True),
            "loose": model.loose,
            "cache": model.cache["last"],
            "x": x,
            "global": GLOBAL,
        }
        hooks = [
            [list(value) for key, value in sorted(vars(m).items()) if "hooks" in key]
            for m in model.modules()
        ]
        state = {
            key: (tensor.clone().tolist(), tensor._version, id(tensor))
            for key, tensor in tensors.items()
        }
        rng = (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()))
        flags = [m.training for m in model.modules()]
        return (
            state,
            hooks,
            rng,
            flags,
            model.history[:],
            model.count,
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    before = everything()
    with FlopCounterMode(display=False) as counter:
        scanned = scan(model, x)
    assert scanned.ended is None and [call.module for call in scanned.calls] == [
        "",
        "norm",
        "linear",
    ]
    for state_after, state_before in zip(everything(), before, strict=True):
        assert state_after == state_before
    assert not fired
    assert counter.get_total_flops() == 0 < scanned.flops


def test_no_object_remains():
    model = nn.Sequential(nn.Linear(3, 3))
    scanned = scan(model, torch.ones(2, 3))
    gone = [weakref.ref(model), weakref.ref(model[0].weight)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None] and len(scanned.calls) == 2


def test_a_running_session_does_not_record_it():
    model = nn.Sequential(nn.Linear(3, 3))
    with recording(modules="^0$") as sink:
        scanned = scan(model, torch.ones(2, 3))
        assert [call.module for call in scanned.selected] == ["0"]  # the session's selection
        model(torch.ones(2, 3))
    assert [(record.model, record.module, record.step) for record in sink.records] == [
        ("Sequential", "0", 0)
    ]
    assert [
        scope.attributes["torch.model"] for scope in sink.opened if scope.kind == "forward"
    ] == ["Sequential"]


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        x = self.second(x[x[:, 0] > 0])
        if x.sum() > 0:
            return self.first(x)
        return x


def test_a_model_that_depends_on_values_is_scanned_up_to_there(capfd):
    scanned = scan(DataDependent(), torch.ones(3, 4))
    assert [(call.module, call.finished, call.dynamic) for call in scanned.calls] == [
        ("", False, True), ("first", True, False), ("second", True, True),
    ]  # fmt: skip
    assert (
        scanned.calls[2].outputs[0].shape == (-1, 4) and scanned.calls[2].outputs[0].bytes is None
    )
    assert scanned.flops == 2 * 3 * 4 * 4 and scanned.dynamic
    assert not scanned.failed
    assert (
        "in the root (DataDependent), at test_scan.py:" in scanned.ended
        and "`if x.sum() > 0:`" in scanned.ended
    )
    assert scanned.ended.endswith("what comes next depends on the data")
    assert "! the scan ended in the root" in str(scanned)
    assert capfd.readouterr() == ("", "")


def test_a_condition_over_several_lines_is_shown_whole():
    class Careful(nn.Module):
        def forward(self, x):
            if torch.any(
                x > 0
            ):  # fmt: skip
                return x
            return -x

    scanned = scan(Careful(), torch.ones(3, 4))
    assert "`if torch.any(x > 0 ):" in scanned.ended


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.linear = read, nn.Linear(4, 4)

    def forward(self, x):
        return self.read(self.linear(x))


@pytest.mark.parametrize(
    "read", [lambda x: x.detach().numpy(), lambda x: [1 for row in x if row.any()], torch.svd]
)
def test_every_way_to_need_a_value_stops_with_a_reason(read):
    scanned = scan(Reads(read), torch.ones(3, 4))
    assert [call.module for call in scanned.calls] == ["", "linear"]
    assert (
        scanned.ended is None
        if read is torch.svd
        else (not scanned.failed and "test_scan.py" in scanned.ended)
    )


def test_an_error_of_the_forward_is_a_failure():
    scanned = scan(DataDependent(), torch.ones(3, 5))
    assert (
        scanned.failed
        and "in first (Linear), at test_scan.py" in scanned.ended
        and "RuntimeError" in scanned.ended
    )


def test_a_tensor_of_one_element_keeps_its_value():
    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.early, self.late = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, t):
            return self.early(x) if t > 500 else self.late(x)

    x = torch.ones(1, 2)
    assert [scan(Switched(), x, torch.tensor([t])).calls[1].module for t in (900, 100)] == [
        "early",
        "late",
    ]


@dataclasses.dataclass
class Output:
    sample: torch.Tensor
    extra: dict


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x, *, mask=None):
        x = self.inner({"a": x, "b": [x, mask]})
        return Output(x["a"], {"half": x["a"].half()})


def test_tensors_are_labeled_as_in_a_record():
    scanned = scan(Structured(), torch.ones(2), mask=torch.ones(3, dtype=torch.bool))
    root, inner = scanned.calls
    assert [(v.label, v.shape, v.dtype, v.bytes) for v in root.inputs] == [
        ("in[0]", (2,), "float32", 8),
        ("in.mask", (3,), "bool", 3),
    ]
    assert [(v.label, v.dtype) for v in root.outputs] == [
        ("out.sample", "float32"),
        ("out.extra.half", "float16"),
    ]
    assert [v.label for v in inner.outputs] == ["out.a", "out.b[0]", "out.b[1]"]


def test_shared_modules_and_repeated_calls_are_distinguished():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, shared), nn.Sequential(shared))
    scanned = scan(model, torch.ones(1, 2))
    assert [(call.module, call.call, call.depth) for call in scanned.calls] == [
        ("", 0, 0), ("0", 0, 1), ("0.0", 0, 2), ("0.0", 1, 2), ("1", 0, 1), ("1.0", 0, 2),
    ]  # fmt: skip
    assert scanned.parameter_bytes == 24


def test_wrappers_are_left_out():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), torch.compile(nn.ReLU()))
    model[0].compile()
    scanned = scan(torch.compile(model), torch.ones(1, 2))
    assert scanned.model == "Sequential" and [call.module for call in scanned.calls] == [
        "",
        "0",
        "1",
    ]


def put_wrapper_on(module, log):
    """Replace `forward` by another function, as offloading and older hook libraries do."""
    forward = module.forward

    def wrapped(*args, **kwargs):
        log.append(1)
        return forward(*args, **kwargs)

    module.forward = wrapped


def test_a_replaced_forward_runs_on_the_copy():
    log = []
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    put_wrapper_on(model[0], log)
    assert [call.module for call in scan(model, torch.ones(1, 2)).calls] == ["", "0", "0.0"]
    assert log == []


def test_only_what_cannot_be_copied_is_shared():
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.held = {"lock": threading.Lock(), "module": self.linear, "seen": torch.zeros(2)}

        def forward(self, x):
            with self.held["lock"]:
                self.held["seen"].add_(1)
                return self.held["module"](x)

    model = Locked()
    assert [call.module for call in scan(model, torch.ones(1, 2)).calls] == ["", "linear"]
    assert model.held["seen"].tolist() == [0, 0] and not model.held["lock"].locked()


def test_a_method_can_be_scanned():
    model, _, _ = build_vae()
    scanned = scan(model.decode, torch.empty(1, 4, 8, 8, device="meta"))
    assert (
        scanned.calls[0].module == "post_quant_conv"
        and scanned.calls[-1].module == "decoder.conv_out"
    )
    assert scanned.calls[-1].outputs[0].shape == (1, 3, 8, 8)
    assert scanned.flops == sum(call.flops for call in scanned.calls if call.depth == 0)


def test_only_models_are_accepted():
    with pytest.raises(TypeError, match="a module or a bound method of one"):
        scan(len, [])
    with pytest.raises(ValueError, match="run it once"):
        scan(nn.LazyLinear(3), torch.ones(1, 2))


def test_autocast_and_grad_mode_are_the_callers():
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        (value,) = scan(model, torch.ones(1, 2)).calls[0].outputs
    assert value.dtype == "bfloat16" and not value.requires_grad
    with torch.inference_mode():
        scanned = scan(model, torch.ones(1, 2))
    assert scanned.ended is None and scanned.flops == 8


@pytest.mark.parametrize(
    "capture", ["outputs", "inputs,outputs", "parity", "outputs,gradients,parameters"]
)
def test_the_cost_is_the_size_of_a_recording(tmp_path, capture):
    pytest.importorskip("safetensors")
    model, _, _ = build_gpt2()
    model.eval()
    selection = {"modules": r"^transformer\.h\.\d+", "exclude": "dropout", "capture": capture}
    scanned = scan(model, IDS).select(**selection)
    folders = {
        "otlp_file": str(tmp_path / "otlp"),
        "tensors": str(tmp_path / "tensors"),
        "jsonl": str(tmp_path / "run.jsonl"),
    }
    with recording(
        **selection,
        **folders,
        signals="spans,span_events,log_events,metrics",
        training="0",  # its rows are not those of a forward
        run_id="mine",
    ) as sink:
        output = model(IDS).logits
        if "gradients" in capture:
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            output.sum().backward()
            optimizer.step()
    once = [record for record in sink.records if record.phase == "attach"]
    cost, once_cost = scanned.cost, scanned.cost_once
    assert (cost.records, once_cost.records) == (len(sink.records) - len(once), len(once))
    assert (once_cost.records > 0) == (capture != "outputs" and capture != "inputs,outputs")

    def written(path):
        return sum(file.stat().st_size for file in tmp_path.glob(path))

    def told(name):
        return getattr(cost, name) + getattr(once_cost, name)

    assert told("jsonl_bytes") == pytest.approx(written("run.jsonl"), rel=0.05)
    assert told("tensor_bytes") == pytest.approx(written("tensors/**/*.safetensors"), rel=0.05)
    # spans are sent besides events, and the histogram and counters besides the points
    for name, file in (("span_event", "traces"), ("log_event", "logs"), ("metric", "metrics")):
        assert 0.8 < told(f"{name}_file_bytes") / written(f"otlp/{file}.jsonl") < 1.02
        assert told(f"{name}_bytes") < told(f"{name}_file_bytes") / 2


def test_parity_records_buffers_too():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()).eval()
    scanned = scan(model, torch.ones(2, 3)).select(capture="parity")
    with recording(capture="parity") as sink:
        model(torch.ones(2, 3))
    once = [record.tensor for record in sink.records if record.phase == "attach"]
    assert scanned.cost_once.records == len(once) == 5 and "buffer.running_mean" in once


def test_the_cost_is_the_size_of_what_is_sent(monkeypatch):
    model, _, _ = build_gpt2()
    cost = scan(model.eval(), IDS).cost
    with Receiver() as receiver:
        for name, value in receiver.environment().items():
            monkeypatch.setenv(name, value)
        with recording(signals="spans,span_events,log_events,metrics"):
            model(IDS)

    def sizes(signal, *fields, only=bool):
        messages = receiver.requests[signal]
        for field in fields:
            messages = [item for message in messages for item in getattr(message, field)]
        return [
            message.ByteSize() + 3 for message in messages if only(message)
        ]  # plus the field's tag and length

    events = sizes("traces", "resource_spans", "scope_spans", "spans", "events")
    logs = sizes("logs", "resource_logs", "scope_logs", "log_records")
    names = {
        f"torch.module.activation.{name}"
        for name in ("abs_mean", "sum", "min", "max", "mean", "std")
    }
    gauges = sizes(
        "metrics",
        "resource_metrics",
        "scope_metrics",
        "metrics",
        only=lambda metric: metric.name in names,
    )
    assert cost.records == len(events) == len(logs)
    assert cost.span_event_bytes == pytest.approx(sum(events), rel=0.03)
    assert cost.log_event_bytes == pytest.approx(sum(logs), rel=0.03)
    assert cost.metric_bytes == pytest.approx(
        sum(gauges), rel=0.15
    )  # the step may be an attribute of a data point


def test_a_tensor_has_one_number_in_all_calls():
    model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.ReLU(inplace=True))
    root, linear, identity, relu = scan(model, torch.ones(2, 4)).calls
    assert root.inputs[0].number == linear.inputs[0].number
    assert (
        linear.outputs[0].number
        == identity.inputs[0].number
        == identity.outputs[0].number
        == relu.inputs[0].number
    )
    # a tensor that was changed in place counts as another one
    assert relu.outputs[0].number == root.outputs[0].number != relu.inputs[0].number


def test_running_and_reporting_do_not_import_each_other(tmp_path):
    check = "import sys, otel_torch.scanning.fake_run; sys.exit('otel_torch.scanning.scan' in sys.modules)"
    assert run_python(tmp_path, check, OTEL_TORCH_ENABLED="0").returncode == 0


def test_a_scan_can_be_selected_from_repeatedly():
    model, args, _ = build_gpt2()
    scanned = scan(model, *args)
    selection = scanned.select(modules=r"h\.1\.mlp$", stats="mean")
    assert [call.module for call in selection.selected] == [
        "transformer.h.1.mlp"
    ] and selection.cost.records == 1
    assert selection.cost.jsonl_bytes < scanned.cost.jsonl_bytes / 10
    assert "transformer.h.0" not in str(selection)
    assert "transformer.h.0" in selection.render(everything=True)
    assert not scanned.select(models="^T5").selected
    with pytest.raises(TypeError, match="has no setting 'module'"):
        scanned.select(module="x")
    with pytest.raises(ValueError, match="not a regular expression"):
        scanned.select(modules="[")


# -- the command

PROGRAM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, hidden_states, scale=None):
        return self.linear(hidden_states)

model = Block()
number = 5
def build():
    return Block(), (torch.ones(2, 4),)
def build_named():
    return Block(), (), {"hidden_states": torch.ones(2, 4)}
def returns_a_number():
    return 5
def fails():
    raise RuntimeError("no\\nway")
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program_to_scan.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize(
    "words",
    [
        ["build"],
        ["build_named"],
        ["model", "--input", "hidden_states=2x4"],
        ["Block", "--input", "hidden_states=2,4:float32"],
    ],
)
def test_the_command_takes_models_functions_and_classes(program, words, capsys):
    assert main(["scan", f"{program}:{words[0]}", *words[1:], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (
        shown["schema"] == "otel_torch.scan/1"
        and shown["model"] == "Block"
        and shown["ended"] is None
    )
    assert [(call["module"], call["class"], call["flops"]) for call in shown["calls"]] == [
        ("", "Block", 64),
        ("linear", "Linear", 64),
    ]
    assert shown["calls"][1]["outputs"][0]["shape"] == [2, 4]


def test_the_table_fits_the_terminal(tmp_path, monkeypatch, capsys):
    path = tmp_path / "wide.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class TransformerDecoderLayerWithALongName(nn.Sequential): pass\n"
        "def build():\n    model = nn.Sequential()\n"
        "    model.text_encoder_of_the_pipeline = TransformerDecoderLayerWithALongName(nn.Linear(4, 4))\n"
        "    return model, (torch.ones(2, 4),), {}\n"
    )
    narrow = in_terminal(90, 40, "scan", f"{path}:build")
    table = narrow[narrow.index("") + 1 :]
    assert len(table) == 4 and max(map(len, table)) <= 90 and "…" in table[2]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["scan", f"{path}:build"]) == 0
    assert "TransformerDecoderLayerWithALongName" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no TARGET of the form"),
        (["nowhere_at_all:x"], "nowhere_at_all cannot be imported: ModuleNotFoundError"),
        (["nowhere.py:x"], "nowhere.py: no such file"),
        (["PROGRAM:absent"], "has no absent"),
        (["PROGRAM:number"], "is an int, not a model"),
        (["PROGRAM:returns_a_number"], "returned an int; it must return a model"),
        (["PROGRAM:fails"], "failed: RuntimeError: no way"),
        (["PROGRAM:model"], "it needs --input hidden_states=SHAPE and takes hidden_states, scale"),
        (["PROGRAM:build", "--input", "other=2"], "unexpected keyword argument 'other'"),
        (["PROGRAM:build", "--input", "2x4"], "use NAME=SHAPE[:DTYPE]"),
        (["PROGRAM:build", "--input", "scale=2:number"], "number is not a torch dtype"),
        (["PROGRAM:build", "--method", "decode"], "Block has no such method"),
        (["PROGRAM:build", "--component", "vae"], "is for the folder of a pipeline"),
        (["PROGRAM:build", "--modules", "["], "not a regular expression"),
        (
            ["PROGRAM:build", "--modules", "conv"],
            "no module of Block is selected (2 modules, for example 'linear')",
        ),
        (
            ["PROGRAM:model", "--input", "hidden_states=2x5"],
            "failed in linear (Linear), at program_to_scan.py:10 `return self.linear(hidden_states)`",
        ),
    ],
)
def test_bad_input_is_one_line(program, words, message, capsys):
    assert main(["scan", *(word.replace("PROGRAM", program) for word in words)]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr and stderr.count("\n") == 1 and "Traceback" not in stderr


def test_the_variables_apply(program, capsys, monkeypatch):
    monkeypatch.setenv("OTEL_TORCH_MODULES", "linear")
    assert main(["scan", f"{program}:build"]) == 0
    shown = capsys.readouterr().out
    assert (
        "selected: 1 of 2 modules, 1 calls\nrecording outputs, per forward: 1 records, 32 B of tensors read\n"
        in shown
    )
    assert "(root)" not in shown
    assert main(["scan", f"{program}:build", "--all"]) == 0
    assert "(root)" in capsys.readouterr().out
    assert main(["scan", f"{program}:build", "--exclude", "linear"]) == 2


def test_the_cost_of_a_whole_run_and_a_disk_that_is_too_small(program, capsys, monkeypatch):
    assert main(["scan", f"{program}:build", "--forwards", "1000"]) == 0
    shown = capsys.readouterr().out
    assert (
        "recording outputs, 1,000 forwards: 2,000 records, 64 kB of tensors read\n  JSONL " in shown
        and "!" not in shown
    )
    assert "OTLP log events" in shown and "span events" not in shown
    monkeypatch.setenv("OTEL_TORCH_MAX_BYTES", "100kB")
    monkeypatch.setenv("OTEL_TORCH_SIGNALS", "log_events")
    assert main(["scan", f"{program}:build", "--forwards", "1000"]) == 0
    shown = capsys.readouterr().out
    assert (
        "writing stops at OTEL_TORCH_MAX_BYTES, 100 kB" in shown
        and "OTLP log events" in shown
        and "metrics" not in shown
    )
    assert main(["scan", f"{program}:build", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["records"] == 2 and 0 < cost["log_event_bytes"] < cost["log_event_file_bytes"]
    assert main(["scan", f"{program}:build", "--forwards", "0"]) == 2
    assert "'0' is not a number of at least 1" in capsys.readouterr().err


def test_a_selection_of_modules_that_never_run_is_an_error(capsys, tmp_path, program):
    path = tmp_path / "unused.py"
    path.write_text(
        PROGRAM.replace("self.linear = nn", "self.unused = nn.ReLU(); self.linear = nn")
    )
    assert main(["scan", f"{path}:build", "--modules", "unused"]) == 2
    assert (
        "the selected modules of Block (unused) are never called by this forward"
        in capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Make a pipeline's folder with configurations and without weights."""
    folder = tmp_path_factory.mktemp("pipeline")
    parts = {"transformer": build_wan, "vae": build_vae, "text_encoder": build_t5_encoder}
    index = {
        "_class_name": "WanPipeline",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "image_encoder": [None, None],
    }
    for name, build in parts.items():
        model, _, _ = build()
        if name == "text_encoder":
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder / name)
        else:
            model.save_config(folder / name)
        index[name] = [type(model).__module__.partition(".")[0], type(model).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("words", "model", "module"),
    [
        (["--component", "text_encoder"], "T5EncoderModel", "encoder.block.0"),
        (["--component", "vae", "--method", "decode", "--input", "z=1x4x8x8"], "AutoencoderKL", "decoder.mid_block"),
        (["--component", "transformer", "--input", "hidden_states=1x4x2x8x8", "--input", "timestep=1",
          "--input", "encoder_hidden_states=1x5x16"], "WanTransformer3DModel", "blocks.0"),
    ],
)  # fmt: skip
def test_a_folder_with_configurations_is_enough(pipeline, words, model, module, capsys):
    assert main(["scan", str(pipeline), *words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (
        shown["model"] == model
        and module in [call["module"] for call in shown["calls"]]
        and shown["ended"] is None
    )


def test_a_folder_of_one_model_needs_no_component(pipeline, capsys):
    assert main(["scan", str(pipeline / "text_encoder"), "--modules", "SelfAttention$"]) == 0
    assert "encoder.block.0.layer.0.SelfAttention  T5Attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "words", "message"),
    [
        ("", [], "use --component with transformer, vae, text_encoder"),
        ("", ["--component", "scheduler"], "no model 'scheduler'"),
        ("vae", [], "it needs --input sample=SHAPE"),
        ("vae", ["--component", "vae"], "has no model_index.json"),
        ("empty", [], "neither model_index.json nor config.json"),
        ("broken", [], "config.json cannot be read"),
        ("unknown", [], "the installed diffusers has no class NoSuchModel"),
        ("strange", [], "transformers cannot read its configuration"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    pipeline, tmp_path, place, words, message, capsys
):
    for name, content in (
        ("empty", None),
        ("broken", "{"),
        ("unknown", '{"_class_name": "NoSuchModel"}'),
        ("strange", "{}"),
    ):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "config.json").write_text(content)
    folder = tmp_path / place if place and (tmp_path / place).exists() else pipeline / place
    assert main(["scan", str(folder), *words]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr and stderr.count("\n") == 1
