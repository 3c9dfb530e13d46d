"""Every query of the dashboards, the alerts and the docs returns data from the real Prometheus and
Loki.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e import apis
from tests.e2e.conftest import Stack
from tests.e2e.stack import SHIPPED, eventually
from tests.support import PROGRAMS, environment, run_python

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
MADE = runpy.run_path(str(SHIPPED / "grafana" / "make_dashboards.py"))
QUERIES = [
    (f"{board}: {panel.title}, {at}", query)
    for at, (board, panel, query) in enumerate(MADE["queries"]())
]
RULES = [
    rule
    for group in yaml.safe_load((SHIPPED / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
BACKENDS = Path(__file__).parents[2] / "docs" / "backends"
# the variables of a dashboard when it is opened
CHOSEN = {"statistic": "abs_mean", "__range": "1h"} | MADE["ALL"]

# a model without weights: after some steps its values are fifty times as large, then NaN; and it
# has more series than allowed
TROUBLED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Identity())
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(12):
    x = torch.ones(2, 4) * (50.0 if step == 8 else float("nan") if step == 10 else 1.0)
    model(x).sum().backward()
    optimizer.step()
"""

# an hour of training; with FAULTS it goes wrong in the last minutes
TRAINING = PROGRAMS / "training/train_for_an_hour.py"
# torch allocates on no device here: the memory of one is that of a scope made by hand
DEVICE_MEMORY = (
    (PROGRAMS / "sinks_without_torch.py").read_text()
    + """
scope = Scope("step", "torch.step", False, {"torch.step": 0, "torch.model": "Net"}, training=True)
recorder.open(scope)
scope.attributes["torch.training.device_memory"] = 2**30
recorder.close(scope)
finish()
"""
)

# two hours of values that look alarming and are not, by model
SOUND = (
    (PROGRAMS / "sinks_without_torch.py").read_text()
    + """
import math, random
draw, STEPS = random.Random(0), 240
LOSSES = {
    "Falling": lambda step: 10 * 0.9**step + 0.01,
    "Negative": lambda step: -5 - 0.01 * step,
    "Constant": lambda step: 2.0 + 1e-7 * draw.random(),
    "Noisy": lambda step: draw.lognormvariate(0, 1),
    "Cyclic": lambda step: 3 + math.sin(step / 10),
    "AroundZero": lambda step: draw.gauss(0, 1e-3),
}
RATIOS = {
    "Warmup": lambda step: 1e-3 * step / STEPS,
    "Restarts": lambda step: 1e-3 * (1.1 + math.cos(step / 12)),
    "Frozen": lambda step: 0.0,
}
now = time.time_ns()
for step in range(STEPS):
    at = now - (STEPS - step) * 30 * 10**9
    values = [(model, "loss", value(step)) for model, value in LOSSES.items()]
    if step < 10 or step % 10 == 0:
        values += [(model, "update_ratio", value(step)) for model, value in RATIOS.items()]
    run_step(step, [
        Record("", tensor, step, 0, 0, model, "train", None, {"mean": value}, at) for model, tensor, value in values
    ], training=True)
finish()
"""
)

# what a reader replaces by their own names
THEIRS = (("\\|", "|"), ('="my-model"', '=~"dashboards-.+"'), ('dl_rank="1"', 'dl_rank="0"'))


def documented(page: str) -> list[str]:
    """Return the queries of a page's table, changed to match the data sent here."""
    found = re.findall(
        r"^\| [^|`]+ \| `(.+?)`(?: \||:)", (BACKENDS / f"{page}.md").read_text(), re.M
    )
    for old, new in THEIRS:
        found = [query.replace(old, new) for query in found]
    return [query for query in found if "…" not in query]


def chosen(text: str) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: CHOSEN.get(match[1], ".*"), text)


FREE_OF_ALERTS = [
    f"dashboards-{service}" for service in ("bounded", "training", "healthy", "device", "sound")
]


@pytest.fixture(scope="module")
def sent(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Send a bounded loop with regions, a training with log events, one whose steps seem to be
    long, the memory of a device, a run that loses records on purpose, and a training that goes
    wrong.
    """
    for service, program, variables in (
        ("bounded", EXAMPLES / "quickstart.py", {}),
        (
            "training",
            EXAMPLES / "transformers_train.py",
            {"OTEL_TORCH_SIGNALS": "spans,log_events,metrics"},
        ),
        (
            "troubled",
            TROUBLED,
            {"OTEL_TORCH_METRIC_SERIES": "24", "OTEL_TORCH_SIGNALS": "spans,log_events,metrics"},
        ),
        ("healthy", TRAINING, {}),
        ("troubled", TRAINING, {"FAULTS": "1"}),
        ("device", DEVICE_MEMORY, {}),
        ("sound", SOUND, {}),
    ):
        folder = tmp_path_factory.mktemp(service)
        run_python(folder, program, **(stack.environment(f"dashboards-{service}") | variables))
        assert environment(folder)
    yield stack


@pytest.mark.parametrize(
    "query", [query for _, query in QUERIES], ids=[name for name, _ in QUERIES]
)
def test_a_query_returns_data(sent: Stack, query: object) -> None:
    if query.source == "tempo":
        pytest.skip("Tempo cannot be built here: its query was not asked")
    text = chosen(query.text)
    if query.source == "loki":
        eventually(lambda: apis.log_events(sent.loki, text))
    else:
        eventually(lambda: apis.series(sent.prometheus, text))


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_fires_for_what_it_is_for(sent: Stack, rule: dict[str, object]) -> None:
    eventually(lambda: apis.series(sent.prometheus, rule["expr"]))
    labels = [labels for labels, _ in apis.series(sent.prometheus, rule["expr"])]
    assert {one["job"] for one in labels} >= {"dashboards-troubled"}
    assert not [each for each in labels if each["job"] in FREE_OF_ALERTS]
    # Prometheus loads the rules of the shipped file and fires them itself
    eventually(
        lambda: apis.series(
            sent.prometheus, f'ALERTS{{alertname="{rule["alert"]}", job="dashboards-troubled"}}'
        )
    )


def test_the_values_for_which_no_alert_fires_have_arrived(sent: Stack) -> None:
    def counts() -> list[int]:
        losses = 'torch_training_loss{job="dashboards-sound"}[3h]'
        return [len(values) for _, values in apis.series(sent.prometheus, losses)]

    eventually(lambda: counts() == [240] * 6)


@pytest.mark.parametrize("query", documented("prometheus"))
def test_what_the_page_about_prometheus_asks(sent: Stack, query: str) -> None:
    eventually(lambda: apis.series(sent.prometheus, query))


@pytest.mark.parametrize("query", documented("loki"))
def test_what_the_page_about_loki_asks(sent: Stack, query: str) -> None:
    if query.startswith("sum"):
        eventually(lambda: apis.log_count(sent.loki, query))
    else:
        eventually(lambda: apis.log_events(sent.loki, query))
