"""The contents of a cache and every way to look them up."""

import copy
import dataclasses
import gc
import pickle
import re
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from otel_torch import Cache, CacheDict
from otel_torch.capture.cache import CacheFull


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        return self.project(x), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.output = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.attn(x, mask=x > 0)[0])


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


IDS = torch.tensor([[1, 2, 3]])


def make(layers: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(layers)


def cache_forward(model: Net, *arguments: object, **options: object) -> CacheDict:
    with torch.no_grad(), Cache(*arguments, **options).attach(model) as cache:
        model(IDS)
    return cache


def test_every_form_of_access_returns_the_same_module() -> None:
    cache = cache_forward(make(12))
    view = cache.model.h[1]
    forms = [
        cache["model.h.1"],
        cache["h.1"],
        cache.h[1],
        cache.model["h.1"],
        cache.model.h["1"],
        cache.h[-11],
        cache.h[:3][1],
    ]
    assert all(form.output is view.output for form in forms)
    assert view.attn.project.output.shape == (1, 3, 4) and len(cache.h[2:5]) == 3
    assert cache.h[10].output is cache["h.10"].output is not view.output
    assert isinstance(view.attn.output, tuple) and view.attn.output[1] is None


def test_keys_are_the_called_modules_below() -> None:
    cache = cache_forward(make(), include_inputs=True)
    inside = [f"model.h.1{rest}" for rest in ("", ".attn", ".attn.project", ".output")]
    assert (
        list(cache.model.h[1]) == inside == list(cache.h[1].keys())
    )  # with inputs: in the order in which calls start
    assert len(cache) == 15 == len(list(cache.items())) and len(cache.h) == 12
    assert (
        "h.0" in cache.model
        and "model.h.0" in cache
        and "h" not in cache
        and "hea" not in cache
        and "nope" not in cache
    )
    assert all(cache[key] is not None for key in cache)
    assert list(cache_forward(make()).h[1]) == [
        inside[2],
        inside[1],
        inside[3],
        inside[0],
    ]  # without: in the order in which they end


def test_missing_modules_raise_with_the_existing_names() -> None:
    cache = cache_forward(make(), "h.1")
    with pytest.raises(AttributeError, match=r"model has no module 'hea'; it has embed, h, head"):
        cache.hea  # noqa: B018
    with pytest.raises(KeyError, match=r"model\.h has no module '7'; it has 0, 1, 2"):
        cache.h["7"]
    with pytest.raises(IndexError, match=r"model\.h has 3 entries, none at index 9"):
        cache.h[9]
    with pytest.raises(TypeError, match=r"model\.h\.1 is not a list of modules"):
        cache.h[1][0]
    with pytest.raises(
        AttributeError, match=r"no call of model\.h\.0 is cached, so it has no input"
    ):
        cache.h[0].input  # noqa: B018
    assert repr(CacheDict()) == "model: nothing is cached"


def test_modules_are_chosen_by_object_name_and_pattern() -> None:
    model = make()
    cache = cache_forward(model, [model.h[0], "model.head", "embed", re.compile(r"2\.attn$")])
    assert list(cache) == ["model.embed", "model.h.0", "model.h.2.attn", "model.head"]
    for wrong, meant in (
        ("model.haed", "did you mean 'head'"),
        ("h.1.atn", "did you mean 'h.1.attn'"),
        ("zzz", "it has embed, h, head"),
    ):
        with pytest.raises(ValueError, match=meant):
            Cache(wrong).attach(model)
    with pytest.raises(ValueError, match="no module of Net matches 'moe'"):
        Cache(re.compile("moe")).attach(model)
    with pytest.raises(ValueError, match="Linear is not in Net"):
        Cache(nn.Linear(1, 1)).attach(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_later_in_place_operations_do_not_change_it() -> None:
    model = make()
    with torch.no_grad():
        expected = model.h[0].attn.project(model.embed(IDS))
    cache = cache_forward(model, include_inputs=True)
    assert torch.equal(cache.h[0].attn.project.output, expected) and (expected < 0).any()
    assert torch.equal(cache["h.0.output"].input, expected)


def test_a_child_with_the_name_of_an_attribute() -> None:
    cache = cache_forward(make())
    assert (
        torch.equal(cache.h[0]["output"].output, cache.h[0].output)
        and cache["model.h.0.output"].calls
    )


def test_inputs_are_cached_with_their_names() -> None:
    cache = cache_forward(make(), "h.0.attn", include_inputs=True)
    args, kwargs = cache.h[0].attn.inputs
    assert (
        len(args) == 1
        and kwargs["mask"].dtype == torch.bool
        and torch.equal(cache.h[0].attn.input, args[0])
    )
    only = cache_forward(make(), "head", include_inputs=True, include_output=False)
    assert only.head.input.shape == (1, 3, 4) and only.head.output is None
    assert (
        Cache.Entry(inputs=((), {})).input is None and Cache.Entry(inputs=((), {"x": 1})).input == 1
    )
    with pytest.raises(ValueError, match="would stay empty"):
        Cache(include_output=False)
    with (
        pytest.raises(
            RuntimeError, match=r"not attached to a model; write `with Cache\(…\)\.attach\(model\)"
        ),
        Cache(),
    ):
        pass


def test_only_floating_point_tensors_are_cast() -> None:
    cache = cache_forward(make(), include_inputs=True, dtype=torch.float16)
    assert cache.embed.input.dtype == torch.int64 and cache.head.output.dtype == torch.float16
    model = make()
    with Cache("head", detach=False, device=None).attach(model) as graph:
        model(IDS)
    assert (
        graph.head.output.requires_grad
        and not cache_forward(model, "head").head.output.requires_grad
    )


def test_several_calls_are_a_list_and_the_attributes_are_the_last() -> None:
    model = make()
    with torch.no_grad(), Cache("head", include_inputs=True).attach(model) as cache:
        first, second = model(IDS), model(IDS + 1)
    assert [entry.output.tolist() for entry in cache.head.calls] == [
        first.tolist(),
        second.tolist(),
    ]
    assert torch.equal(cache.head.output, second) and len(cache) == 1
    assert repr(cache.head.calls[0]) == "Entry((float32[1, 3, 4]) → float32[1, 3, 2])"
    assert "(2 calls)" in repr(cache)


def test_a_call_that_raised_does_not_get_the_output_of_the_next() -> None:
    model = make()
    with torch.no_grad(), Cache(include_inputs=True).attach(model) as cache:
        with pytest.raises(IndexError):
            model(IDS + 100)
        model(IDS)
    assert [entry.has_output for entry in cache.embed.calls] == [False, True]
    assert torch.equal(cache.embed.input, IDS) and torch.equal(
        cache.model.calls[1].output, cache.model.output
    )


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    words: str = "kept"


class Structured(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"result": Result(x * 2), "pair": (x, [x + 1, None])}


def test_every_container_is_cached_without_its_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    model = Structured()
    with Cache().attach(model) as cache:
        result = model(x)
    cached = cache.output
    assert (
        cached["result"].logits.tolist() == [2, 2]
        and not cached["result"].logits.requires_grad
        and cached["result"].words == "kept"
    )
    assert (
        result["result"].logits.requires_grad
        and cached["pair"][1][1] is None
        and not cached["pair"][0].requires_grad
    )


def test_renamed_components_and_modules() -> None:
    cache = cache_forward(
        make(), rename={"h": "layers", "h.0": "first", "unused": "x"}, alias={"logits": "head"}
    )
    assert cache.model.layers[1].output is cache.h[1].output is cache["layers.1"].output
    assert cache.first.output is cache["model.first"].output is cache.h[0].output
    assert (
        cache.first.attn.output is cache.h[0].attn.output
        and cache.logits.output is cache.head.output
    )
    assert "layers.1" in cache and len(cache.layers) == len(cache.h)
    assert list(
        cache_forward(make(), ["layers.0", "first"], rename={"h": "layers", "h.1": "first"})
    ) == [
        "model.h.0",
        "model.h.1",
    ]


def test_repr_is_a_tree() -> None:
    cache = cache_forward(make(1), re.compile("h|head"))
    assert repr(cache).splitlines() == [
        "model",
        "  h",
        "    0  float32[1, 3, 4]",
        "      attn  (float32[1, 3, 4], None)",
        "        project  float32[1, 3, 4]",
        "      output  float32[1, 3, 4]",
        "  head  float32[1, 3, 2]",
    ]
    assert repr(cache.h[0].attn).splitlines()[0] == "attn  (float32[1, 3, 4], None)"
    assert cache._repr_html_().startswith("<pre>model")


def test_pickled_and_copied() -> None:
    cache = cache_forward(make(), include_inputs=True, rename={"h": "layers"})
    for again in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert torch.equal(again.layers[2].output, cache.h[2].output) and list(again) == list(cache)


def test_saved_and_loaded(tmp_path: Path) -> None:
    cache = cache_forward(make(), include_inputs=True, rename={"h": "layers"})
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    loaded = CacheDict.load(path)
    assert list(loaded) == list(cache) and repr(loaded) == repr(cache)
    assert torch.equal(loaded.layers[1].attn.output[0], cache.h[1].attn.output[0])
    assert torch.equal(loaded.h[0].attn.inputs[1]["mask"], cache.h[0].attn.inputs[1]["mask"])
    cache.h[1].save(path)
    assert list(CacheDict.load(path)) == list(cache.h[1])
    (tmp_path / "other").write_text("no cache")
    with pytest.raises(ValueError, match=r"other: not a saved cache \("):
        CacheDict.load(tmp_path / "other")


def test_a_budget_stops_with_a_clear_error_or_goes_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, whole = make(), cache_forward(make(), include_inputs=True)
    with pytest.raises(
        CacheFull, match=r"another \d+ would exceed max_bytes=300; choose fewer modules"
    ):
        cache_forward(model, max_bytes=300)
    assert not any(module._forward_hooks for module in model.modules())
    cache = cache_forward(model, max_bytes=300, overflow="disk", include_inputs=True)
    assert repr(cache) == repr(whole)
    for key in whole:
        if isinstance(whole[key].output, torch.Tensor):
            assert torch.equal(cache[key].output, whole[key].output)
    assert len(list(tmp_path.glob("otel_torch-cache-*/*"))) > 10
    again = pickle.loads(pickle.dumps(cache))
    del cache
    gc.collect()
    assert list(tmp_path.glob("otel_torch-cache-*")) == [] and torch.equal(
        again.head.output, whole.head.output
    )
    with pytest.raises(ValueError, match="'error' or 'disk'"):
        Cache(overflow="elsewhere")


def test_values_added_by_hand() -> None:
    cache = Cache(include_inputs=True)
    cache.add("model.h.0.input.i0", ((torch.ones(2),), {}))
    cache.add("model.h.0.output.i0", torch.ones(3))
    cache.add("output", torch.ones(1))
    assert (
        cache.cache.h["0"].output.shape == (3,)
        and cache.cache.h["0"].input.shape == (2,)
        and cache.cache.output.shape == (1,)
    )
    with pytest.raises(ValueError, match="names neither an output nor an input"):
        cache.add("model.h.0.grad.i0", None)


def test_inside_compiled_graphs(fresh_compiler: None) -> None:
    model = make()
    with torch.no_grad(), Cache(include_inputs=True).attach(model) as cache:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        out = compiled(IDS)
        compiled(IDS)
    assert torch.equal(cache.output, out) and len(cache.h[1].attn.calls) == 2
    assert (
        torch.equal(cache.embed.input, IDS)
        and cache.h[0].attn.inputs[1]["mask"].dtype == torch.bool
    )


def test_no_hook_remains() -> None:
    model = make()
    for _ in range(10):
        cache = cache_forward(model)
    whole = weakref.ref(cache)
    del cache
    gc.collect()
    assert whole() is None and not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("enabled", [True, False])
def test_attaching_sets_the_garbage_collector_off_once_at_most_and_leaves_it_as_it_was(
    enabled: bool,
) -> None:
    model, began = nn.Sequential(*(nn.Identity() for _ in range(2_000))), []

    def note(phase: str, info: dict[str, int]) -> None:
        began.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        if not enabled:
            gc.disable()
        cache = Cache()
        cache.attach(model)
        count, state = began.count("start"), gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    cache.detach()
    assert count <= 1 and state is enabled
