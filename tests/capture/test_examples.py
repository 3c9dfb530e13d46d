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

from otel_torch import Cache, CacheDict, Event, Stash, Tracker, interleave, rmap_tensor, scan, track

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


@SUBJECTS
def test_filters_stashes_and_registering_by_hand(make: Callable[[], Subject]) -> None:
    subject = make()
    model, inputs = Loss(subject.model), subject.inputs
    own = seen(model, lambda: model(inputs))
    layers = [f"model.{subject.blocks}.{index}" for index in range(2)]

    with track(model, include=rf"{subject.blocks}\.\d+$", grad=False) as tracker:
        model(inputs)
    assert [stash.name for stash in tracker] == layers
    with track(model, exclude=f"{subject.attention}|drop", grad=False) as tracker:
        model(inputs)
    assert [stash.name for stash in tracker] == [
        name
        for name, calls in own.items()
        for _ in calls
        if subject.attention not in name and "drop" not in name
    ]
    with track(model, stash_value=lambda t: t.std().detach().cpu(), include=layers[0]) as tracker:
        model(inputs).backward()
    assert all(tensor.dim() == 0 for stash in tracker for tensor in tensors(stash.value))
    deviation = next(stash for stash in tracker if stash.name == layers[0] and not stash.grad)
    assert same(tensors(deviation.value), [tensor.std() for tensor in own[layers[0]][0]])

    def stash(event: Event) -> Stash:
        kinds = [type(value) for value in (*event.args, *event.kwargs.values())]
        return Stash(event.name, event.type, event.grad, (Tensor in kinds, event.grad))

    with track(model, stash=stash, include=f"{layers[1]}$") as tracker:
        model(inputs).backward()
    assert [stash.value for stash in tracker] == [(True, False), (False, True)]

    tracker = Tracker()
    tracker.register(model.model.get_submodule(subject.head), "head")
    model(inputs).backward()
    tracker.unregister()
    model(inputs).backward()
    assert [(stash.name, stash.grad) for stash in tracker] == [("head", False), ("head", True)]
    assert same(tensors(tracker[0].value), own[f"model.{subject.head}"][0])


@SUBJECTS
def test_activations_of_layers_are_stacked_for_a_projection(make: Callable[[], Subject]) -> None:
    """The second notebook of tensor_tracker up to the call of UMAP: one row of features per token
    and layer, with gradients.
    """
    subject = make()
    model = Loss(subject.model)
    with track(
        model,
        include=rf"{subject.blocks}\.\d+$",
        stash_value=lambda t: t.detach().flatten(end_dim=-2),
    ) as tracker:
        model(subject.inputs).backward()
    forward = torch.stack([stash.first_value for stash in tracker if not stash.grad])
    backward = torch.stack([stash.first_value for stash in tracker if stash.grad])
    assert (
        forward.shape == backward.shape
        and len(forward) == 2
        and backward.abs().min(dim=-1).values.shape == forward.shape[:2]
    )
    assert [stash.name[-1] for stash in tracker] == ["0", "1", "1", "0"]


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
def test_modules_are_cached_by_object_and_path_and_cast(make: Callable[[], Subject]) -> None:
    subject = make()
    model, layer = subject.model, subject.model.get_submodule(f"{subject.blocks}.0")
    own = seen(model, lambda: model(**subject.inputs))
    with (
        torch.no_grad(),
        Cache(modules=[layer, f"model.{subject.head}"], dtype=torch.float16, device=None).attach(
            model
        ) as cache,
    ):
        model(**subject.inputs)
    assert list(cache) == [f"model.{subject.blocks}.0", f"model.{subject.head}"]
    assert same(
        tensors(cache[subject.head].output), [tensor.half() for tensor in own[subject.head][0]]
    )
    renamed = Cache(
        layer,
        rename={subject.blocks.rpartition(".")[2]: "layers"},
        alias={"first": f"{subject.blocks}.0"},
    )
    with torch.no_grad(), renamed.attach(model) as cache:
        model(**subject.inputs)
    place = cache.model.transformer if subject.blocks.startswith("transformer") else cache.model
    assert place.layers[0].output is cache.first.output


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


@SUBJECTS
def test_a_body_is_compiled_and_replaces(make: Callable[[], Subject]) -> None:
    subject = make()
    name = f"{subject.blocks}.0"

    def body(run: Any) -> Tensor:
        run[name].output = rmap_tensor(run[name].output, torch.zeros_like)
        return tensors(run[f"{subject.blocks}.1"].input)[0].clone()

    with torch.no_grad():
        step = interleave(subject.model).compile(body)
        assert all(not step(**subject.inputs).any() for _ in range(2))


def test_the_embeddings_of_a_prompt_go_into_another_at_a_barrier() -> None:
    """With the prompt's embeddings, blank tokens generate what the prompt generates."""
    subject = gpt2()
    model, options = (
        subject.model,
        {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None},
    )
    prompt, blanks = subject.inputs["input_ids"], torch.full((1, 5), 7)
    it = interleave(model)
    barrier = it.barrier(2)
    handed: dict[str, Tensor] = {}

    def give(run: Any) -> Tensor:
        handed["embeddings"] = run.transformer.wte.output
        barrier()
        return run.result

    def take(run: Any) -> Tensor:
        barrier()
        run.transformer.wte.output = handed["embeddings"]
        return run.result

    with torch.no_grad():
        runs = (
            it.execute(model.generate, prompt, **options).do(give),
            it.execute(model.generate, blanks, **options).do(take),
        )
        first, second = (run.wait() for run in runs)
    assert (
        first.shape == (1, 8)
        and torch.equal(first[:, 5:], second[:, 5:])
        and torch.equal(second[:, :5], blanks)
    )
    assert torch.equal(first, model.generate(prompt, **options))


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
