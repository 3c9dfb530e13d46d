"""The dashboards are generated from the metric names that are sent, and the files in the repository
are up to date.
"""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

CONFIG = Path(__file__).parents[1] / "collector-config"
made = runpy.run_path(str(CONFIG / "grafana" / "make_dashboards.py"))
DOCUMENTED = (Path(__file__).parents[1] / "docs" / "opentelemetry-names.md").read_text() + (
    CONFIG / "README.md"
).read_text()


def test_the_dashboards_are_up_to_date() -> None:
    files = made["files"]()
    assert {path.name for path in files} == {
        path.name for path in (CONFIG / "grafana" / "dashboards").iterdir()
    }
    for path, text in files.items():
        assert path.read_text() == text, "run `make dashboards`"


def test_every_query_is_in_its_dashboard_with_a_data_source_that_is_provisioned() -> None:
    provisioned = yaml.safe_load(
        (CONFIG / "grafana/provisioning/datasources/otel_torch.yaml").read_text()
    )["datasources"]
    types = {source["uid"]: source["type"] for source in provisioned}
    asked: list[str] = []
    for path in made["files"]():
        board = json.loads(path.read_text())
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        panels += [inner for panel in board["panels"] for inner in panel.get("panels", [])]
        for panel in panels:
            for target in panel["targets"]:
                assert types[target["datasource"]["uid"]] == target["datasource"]["type"]
                asked.append(target.get("expr") or target["query"])
        variables = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", path.read_text())) - {"__all", "__range"}
        assert used == variables, path
    assert sorted(asked) == sorted(query.text for _, _, query in made["queries"]())


@pytest.mark.parametrize(
    "text", [query.text for _, _, query in made["queries"]() if query.source == "prometheus"]
)
def test_every_metric_that_is_asked_for_is_documented(text: str) -> None:
    metrics = re.findall(r"\b((?:torch|otel_torch|traces|otelcol)_[a-z_]+)(?=\$?\{|\$)", text)
    assert metrics
    for name in metrics:
        if name == "torch_module_activation_":
            continue  # of any statistic
        base = re.sub(
            r"_(sum|count|bucket)$",
            "",
            re.sub(r"_(spans|metric_points|log_records)_total$", "_", name),
        )
        assert base in DOCUMENTED, name


def test_links_lead_to_data_sources() -> None:
    text = (CONFIG / "grafana/provisioning/datasources/otel_torch.yaml").read_text()
    uids = {source["uid"] for source in yaml.safe_load(text)["datasources"]}
    assert set(re.findall(r"datasourceUid: (\w+)", text)) <= uids
