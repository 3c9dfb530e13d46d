"""A generation with the real FastVideo, configured by environment only, read back through Jaeger,
Prometheus and Loki.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e import apis
from tests.e2e.conftest import Stack
from tests.e2e.stack import eventually
from tests.e2e.test_read_back import ALL_SIGNALS, KEY, events_in_jaeger, events_in_loki
from tests.fastvideo.conftest import wan  # noqa: F401 - a fixture
from tests.fastvideo.runs import generate

pytestmark = [pytest.mark.e2e, pytest.mark.fastvideo]


def test_a_generation_of_fastvideo(tmp_path: Path, stack: Stack, wan: Path) -> None:
    run = generate(
        tmp_path / "run", wan, OTEL_TORCH_SIGNALS=ALL_SIGNALS, **stack.environment("fastvideo")
    )
    assert run.status == 0, run.output
    rows = run.records()
    assert all(about["lost"] == [] for about in run.metadata())
    expected = Counter(tuple(row[name] for name in KEY) for row in rows)
    # every record is an event of a span, and a log line
    events = events_in_jaeger(stack, "fastvideo", len(rows))
    assert Counter(tuple(event[f"torch.{name}"] for name in KEY) for event in events) == expected
    logged = events_in_loki(stack, "fastvideo", len(rows))
    shown = Counter(tuple(labels.get(f"torch_{name}", "") for name in KEY) for _, labels in logged)
    assert shown == Counter({tuple(map(str, key)): number for key, number in expected.items()})
    # parent and worker share one trace; steps are children of stages, stages of the pipeline
    spans = apis.spans(stack.jaeger, "fastvideo")
    by_id = {span["span_id"]: span for span in spans}
    assert len({span["trace_id"] for span in spans}) == 1
    step = next(
        span
        for span in spans
        if span["attributes"].get("torch.model") == "WanTransformer3DModel"
        and span["name"] == "torch.step"
    )
    above = []
    while step["parent_id"]:
        step = by_id[step["parent_id"]]
        above.append(step["name"])
    assert {
        "fastvideo.stage::DenoisingStage",
        "fastvideo.pipeline::WanPipeline",
        "torch.run",
    } <= set(above)
    # every module of the transformer has its series, with the value of its last call in the last
    # loop of each step
    last = {
        (row["module"], row["tensor"], str(row["step"]), row.get("branch", "")): row["mean"]
        for row in rows
        if row["model"] == "WanTransformer3DModel"
        and isinstance(row["mean"], float)
        and math.isfinite(row["mean"])
    }

    def series() -> dict[tuple[str, ...], float]:
        names = ("torch_module", "torch_tensor", "torch_step", "torch_branch")
        query = 'torch_module_activation_mean{job="fastvideo", torch_model="WanTransformer3DModel"}'
        return {
            tuple(labels.get(name, "") for name in names): values[-1]
            for labels, values in apis.series(stack.prometheus, query)
        }

    eventually(lambda: series().keys() >= last.keys())
    assert series() == last
