"""Values: documented, checked as strictly as can be, and taken from release to release."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.helm.chart import CHART, ROOT, Helm

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text("utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
#: All values of earlier versions of the chart: a file named after the version. None is ever changed.
BASELINES = sorted((ROOT / "tests/fixtures/chart-values").glob("*.yaml"))

#: Objects whose keys are others' business: the server's configuration, checked by the server, and Kubernetes' own.
OPEN = {"config", "config.shutdown"}


def _objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if "properties" in schema:
        yield path, schema
        for name, inner in schema["properties"].items():
            yield from _objects(inner, f"{path}.{name}".lstrip("."))


def test_a_slip_in_a_name_is_refused_everywhere() -> None:
    objects = dict(_objects(SCHEMA))
    objects |= {f"#{name}": inner for name, inner in SCHEMA["definitions"].items() if "properties" in inner}
    assert len(objects) > 25
    assert {path for path, schema in objects.items() if schema.get("additionalProperties") is not False} == OPEN


def test_the_schema_knows_every_value_and_no_other() -> None:
    for path, schema in _objects(SCHEMA):
        values: Any = VALUES
        for step in path.split(".") if path else []:
            values = values[step]
        if path not in OPEN:
            assert schema["properties"].keys() - {"global"} == values.keys(), path


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


def test_the_table_in_the_readme_is_that_of_the_values() -> None:
    command = [sys.executable, str(ROOT / ".ci/chart_docs.py")]
    expected = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert (CHART / "README.md").read_text("utf-8") == expected, "run `make chart-docs`"
    assert expected.count("\n| `") > 80


def test_the_example_in_the_readme_installs(helm: Helm, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", (CHART / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    file = tmp_path / "values.yaml"
    file.write_text(block.replace("REGISTRY", "images.example"), "utf-8")
    rendered = helm.render_file(file)
    assert rendered.one("Deployment")["spec"]["replicas"] == 3
    assert rendered.server()["image"] == "images.example/moorage:0.1.0"


@pytest.mark.parametrize("file", BASELINES, ids=lambda file: file.stem)
def test_values_of_earlier_versions_are_taken(helm: Helm, file: Path) -> None:
    """With all their keys set: `helm upgrade --reuse-values` must find none of them gone."""
    rendered = helm.render_file(file)
    assert len(rendered) >= 8
    before = yaml.safe_load(file.read_text("utf-8"))
    assert rendered.one("Deployment")["spec"]["replicas"] == before["replicaCount"]


@pytest.mark.parametrize("file", BASELINES, ids=lambda file: file.stem)
def test_an_upgrade_keeps_what_can_not_be_changed(helm: Helm, file: Path) -> None:
    """Selectors of workloads and claims of a StatefulSet are final, so they must be what 0.1.0 made."""
    for manifest in helm.render_file(file):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            labels = manifest["spec"]["selector"]["matchLabels"]
            assert set(labels) == {f"app.kubernetes.io/{name}" for name in ("name", "instance", "component")}
            claims = manifest["spec"].get("volumeClaimTemplates", [])
            assert [claim["metadata"]["name"] for claim in claims] in ([], ["data"])


def test_there_is_a_baseline_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] in [file.stem for file in BASELINES]


def test_the_chart_installs_the_version_of_the_repository() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert chart["appVersion"] == version


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("default", ["port-forward service/rl-moorage 50061:50061", "moorage ping --wait 10s", "redis.mode=bundled"]),
        ("embedded", ["WARNING: redis.mode=embedded"]),
        ("tls", ["moorage --server localhost:50061 --ca ca.crt --cert tls.crt", "MOORAGE_TOKEN"]),
        ("monitoring", ["ServiceMonitor and PrometheusRule were left out"]),
    ],
)
def test_notes_say_how_to_begin(helm: Helm, scenario: str, said: list[str]) -> None:
    values = f"--values={CHART / 'ci' / f'{scenario}-values.yaml'}"
    _, _, notes = helm.run("install", "rl", str(CHART), "--dry-run=client", values).partition("NOTES:")
    for words in said:
        assert words in notes
    assert "\n\n\n" not in notes
