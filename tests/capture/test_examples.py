"""The documented examples of tensor_tracker and of nnsight, on a GPT-2 and on a diffusion
transformer: eager and compiled.

The expected values come from copies that PyTorch's own hooks make.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from otel_torch import Cache, CacheDict, Stash, interleave, rmap_tensor, scan, track

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
pytestmark = pytest.mark.scoreboard


@dataclasses.dataclass
class Subject:
    """A model and its arguments. blocks: the name of its list of layers; attention, head:
    of modules in it.
    """

    model: nn.Module
    inputs: dict[str, Any]
    other_inputs: dict[str, Any]
    blocks: str
    attention: str
    head: str


def gpt2(layers: int = 2) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_head=2,
        n_embd=16,
        n_positions=32,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=49,
    )
    model = GPT2LMHeadModel(config).eval()
    tokens, other_tokens = torch.randint(1, 49, (2, 1, 5))
    return Subject(
        model, {"input_ids": tokens, "use_cache": False}, {"input_ids": other_tokens, "use_cache": False}, "transformer.h", "attn",
        "lm_head",
    )  # fmt: skip


def wan(layers: int = 2) -> Subject:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=layers, cross_attn_norm=True, rope_max_seq_len=32,
    ).eval()  # fmt: skip

    def inputs() -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, 4, 2, 4, 4), "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn(1, 5, 16), "return_dict": False,
        }  # fmt: skip

    return Subject(model, inputs(), inputs(), "blocks", "attn1", "proj_out")


class Loss(nn.Module):
    """The model of tensor_tracker's examples: its forward returns a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        output = self.model(**inputs)
        return (output[0] if isinstance(output, tuple) else output.logits).square().mean()


SUBJECTS = pytest.mark.parametrize("make", [gpt2, wan])
COMPILED = pytest.mark.parametrize(("make", "backend"), [(gpt2, "aot_eager"), (wan, "eager")])


def tensors(value: Any) -> list[Tensor]:
    collected: list[Tensor] = []
    rmap_tensor(value, collected.append)
    return collected


def seen(model: nn.Module, forward: Callable[[], object]) -> dict[str, list[list[Tensor]]]:
    """Return copies of the tensors that every module returns, by PyTorch's own hooks: a list per
    call; in the order of ends.
    """
    outputs: dict[str, list[list[Tensor]]] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: outputs.setdefault(name, []).append(
            [tensor.detach().clone() for tensor in tensors(output)]
        )

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    forward()
    for handle in handles:
        handle.remove()
    return outputs


def same(actual: list[Tensor], expected: list[Tensor], exact: bool = True) -> bool:
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    return len(actual) == len(expected) and all(
        close(a, b) for a, b in zip(actual, expected, strict=True)
    )


# -- tensor_tracker


@SUBJECTS
def test_outputs_and_gradients_are_tracked_and_tabled(make: Callable[[], Subject]) -> None:
    pytest.importorskip("pandas")
    subject = make()
    model, inputs = Loss(subject.model), subject.inputs
    own = seen(model, lambda: model(inputs))
    gradients: dict[str, Any] = {}
    handles = [
        module.register_full_backward_pre_hook(
            lambda module, grads, name=name: gradients.__setitem__(name, tensors(grads))
        )
        for name, module in model.named_modules()
    ]
    model(inputs).backward()
    for handle in handles:
        handle.remove()

    with track(model) as tracker:
        model(inputs).backward()

    assert [stash.name for stash in tracker if not stash.grad] == list(
        itertools.chain.from_iterable([name] * len(calls) for name, calls in own.items())
    )
    for stash in tracker:
        if stash.grad and stash.name in gradients:
            # what a module returns and uses itself, as this one its first, has its whole gradient
            # here
            start = stash.name == "model.condition_embedder"
            gradient, expected = tensors(stash.value)[start:], gradients[stash.name][start:]
            assert gradient and same(gradient, expected, exact=False), (
                stash.name
            )  # they are added in another order
        elif not stash.grad:
            assert same(tensors(stash.value), own[stash.name][0]), stash.name
    assert set(gradients) <= {
        stash.name for stash in tracker if stash.grad
    }  # and those of dicts, which torch's hooks skip
    assert all(isinstance(stash, Stash) for stash in list(tracker))
    frame = tracker.to_frame()
    assert list(frame.columns) == ["name", "type", "grad", "std"] and len(frame) == len(tracker)
    assert (
        frame["type"][0]
        == f"{type(dict(model.named_modules())[tracker[0].name]).__module__}.{tracker[0].type.__name__}"
    )
    largest = tracker.to_frame(lambda tensor: tensor.abs().max(), "largest")["largest"]
    for stash, value in zip(
        tracker, largest, strict=True
    ):  # of the first value, as in tensor_tracker; a dict has none
        assert (
            not isinstance(stash.first_value, Tensor)
            or value == stash.first_value.abs().max().item()
        )


@COMPILED
def test_tracked_inside_compiled_graphs(
    make: Callable[[], Subject], backend: str, fresh_compiler: None
) -> None:
    subject = make()
    model, inputs = Loss(subject.model), subject.inputs
    own = seen(model, lambda: model(inputs))
    with torch.no_grad(), track(model) as tracker:
        torch.compile(model, backend=backend)(inputs)
    by_name: dict[str, list[list[Tensor]]] = {}
    for stash in tracker:
        by_name.setdefault(stash.name, []).append(tensors(stash.value))
    assert_same_calls(by_name, own)


def assert_same_calls(
    actual: dict[str, list[list[Tensor]]], own: dict[str, list[list[Tensor]]]
) -> None:
    assert {name: len(calls) for name, calls in actual.items()} == {
        name: len(calls) for name, calls in own.items()
    }
    for name, calls in own.items():
        assert all(
            same(output, expected_output, exact=False)
            for output, expected_output in zip(actual[name], calls, strict=True)
        ), name


# -- nnsight's cache


def everything(cache: CacheDict) -> dict[str, list[list[Tensor]]]:
    return {
        key.removeprefix("model").removeprefix("."): [
            tensors(entry.output) for entry in cache[key].calls
        ]
        for key in cache
    }


@pytest.mark.parametrize(
    ("make", "backend"), [(gpt2, None), (gpt2, "eager"), (wan, None), (wan, "aot_eager")]
)
def test_every_module_is_cached(
    make: Callable[[], Subject], backend: str | None, fresh_compiler: None
) -> None:
    subject = make()
    own = seen(subject.model, lambda: subject.model(**subject.inputs))
    given: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(next(iter([*args, *kwargs.values()])).clone())

    attention = subject.model.get_submodule(f"{subject.blocks}.0.{subject.attention}")
    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        subject.model(**subject.inputs)
    handle.remove()

    with torch.no_grad(), Cache(include_inputs=True).attach(subject.model) as cache:
        model = subject.model if backend is None else torch.compile(subject.model, backend=backend)
        result = model(**subject.inputs)

    assert_same_calls(everything(cache), own)
    first = cache.model[subject.blocks][0][subject.attention]
    assert torch.allclose(first.input, given[0], rtol=1e-4, atol=1e-5)
    assert first.output is cache[f"model.{subject.blocks}.0.{subject.attention}"].output
    assert same(tensors(cache.model.output), tensors(result))


@SUBJECTS
def test_a_scan_has_the_shapes_of_the_cache_and_needs_no_numbers(
    make: Callable[[], Subject],
) -> None:
    subject = make()
    with torch.no_grad(), Cache().attach(subject.model) as cache:
        subject.model(**subject.inputs)
        model = subject.model.to("meta")
        scanned = scan(
            model,
            **{
                key: tensor.to("meta") if key == "hidden_states" else tensor
                for key, tensor in subject.inputs.items()
            },
        )
    shapes: dict[str, list[list[tuple[int, ...]]]] = {}
    for call in scanned.calls:
        shapes.setdefault(call.module, []).append([tuple(value.shape) for value in call.outputs])
    expected_shapes = {
        name: [[tuple(tensor.shape) for tensor in call] for call in calls]
        for name, calls in everything(cache).items()
    }
    assert shapes == expected_shapes


# -- nnsight's tracer


def patched(it: Any, subject: Subject) -> tuple[Tensor, Tensor]:
    """Replace a layer's output of one run by that of another."""
    name = f"{subject.blocks}.{len(subject.model.get_submodule(subject.blocks)) - 1}"
    with it.invoke(**subject.inputs) as a, it.invoke(**subject.other_inputs) as b:
        b[name].output = a[name].output
        return tensors(a.result)[0], tensors(b.result)[0]


@SUBJECTS
def test_a_layer_of_one_invoke_replaces_that_of_another(make: Callable[[], Subject]) -> None:
    subject = make()
    it = interleave(subject.model)
    cache = it.cache(subject.head)
    with torch.no_grad():
        a, b = patched(it, subject)
        exact, replaced = (
            tensors(subject.model(**inputs))[0] for inputs in (subject.inputs, subject.other_inputs)
        )
    assert (
        torch.equal(a, exact)
        and not torch.equal(b, replaced)
        and len(cache[subject.head].calls) == 2
    )
    if (
        "input_ids" in subject.inputs
    ):  # behind the last layer there is nothing of the prompt's own left
        assert torch.equal(b, exact)


@COMPILED
def test_two_invokes_of_a_compiled_model(
    make: Callable[[int], Subject], backend: str, fresh_compiler: None
) -> None:
    subject = make(1)
    with torch.no_grad():
        expected = patched(interleave(subject.model), subject)
        patched_outputs = patched(
            interleave(torch.compile(subject.model, backend=backend)), subject
        )
    assert same(list(patched_outputs), list(expected), exact=False)


def test_guidance_is_two_bodies_with_a_barrier_at_every_step() -> None:
    """The same for a denoising loop: at every step the conditional run's layer goes into the
    unconditional one.
    """
    subject = wan()
    model, steps, name = subject.model, 3, f"{subject.blocks}.0"

    def denoise(inputs: dict[str, Any]) -> Tensor:
        latents = inputs["hidden_states"]
        for step in range(steps):
            timestep = torch.tensor([900 - 300 * step])
            latents = (
                latents
                - 0.1 * model(**inputs | {"hidden_states": latents, "timestep": timestep})[0]
            )
        return latents

    it = interleave(model)
    both = it.barrier(2)
    handed: dict[int, Tensor] = {}

    def give(run: Any) -> Tensor:
        for step in range(steps):
            handed[step] = run[name].output
            both()
            run.next()
        return run.result

    def take(run: Any) -> list[bool]:
        differs = []
        for step in range(steps):
            both()
            differs.append(not torch.equal(run[name].output, handed[step]))
            run[name].output = handed[step]
            run.next()
        return differs

    with torch.no_grad():
        runs = (
            it.execute(denoise, subject.inputs).do(give),
            it.execute(denoise, subject.other_inputs).do(take),
        )
        latents, differs = (run.wait() for run in runs)
        assert (
            torch.equal(latents, denoise(subject.inputs))
            and differs == [True] * steps
            and len(handed) == steps
        )


# -- the compiler that makes code


def test_tracked_and_cached_by_inductor(fresh_compiler: None) -> None:
    subject = gpt2(layers=1)
    own = seen(subject.model, lambda: subject.model(**subject.inputs))
    with torch.no_grad(), track(subject.model) as tracker, Cache().attach(subject.model) as cache:
        torch.compile(subject.model, fullgraph=True)(**subject.inputs)
    assert_same_calls(everything(cache), own)
    assert [stash.name for stash in tracker] == [
        key.removeprefix("model").removeprefix(".") for key in cache
    ]
