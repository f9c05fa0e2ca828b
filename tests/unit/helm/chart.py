"""The chart, rendered: manifests by kind and name, and what a pod of them would see."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/moorage"
SCENARIOS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
MONITORING = "monitoring.coreos.com/v1"
RELEASE, NAMESPACE = "rl", "rollouts"
#: The full name of the release, and so the name of the server's objects.
NAME = f"{RELEASE}-moorage"

Manifest = dict[str, Any]


class Refused(Exception):
    """helm's words for why it does not render."""


class Rendered(list[Manifest]):
    """The manifests of one rendering."""

    def of(self, kind: str) -> list[Manifest]:
        """All of a kind."""
        return [manifest for manifest in self if manifest["kind"] == kind]

    def one(self, kind: str, name: str = NAME) -> Manifest:
        """The one of a kind and name; fails where there is none, or more than one."""
        (found,) = (manifest for manifest in self.of(kind) if manifest["metadata"]["name"] == name)
        return found

    def server(self) -> Manifest:
        """The only container of the server's pods."""
        (container,) = self.one("Deployment")["spec"]["template"]["spec"]["containers"]
        return dict(container)

    def config(self) -> Manifest:
        """What the server reads."""
        loaded: Manifest = yaml.safe_load(self.one("ConfigMap")["data"]["moorage.yaml"])
        return loaded

    def pods(self) -> Iterator[tuple[str, Manifest]]:
        """Every pod or pod template with its owner's kind and name."""
        for manifest in self:
            where = f"{manifest['kind']}/{manifest['metadata']['name']}"
            if manifest["kind"] == "Pod":
                yield where, manifest
            elif manifest["kind"] in ("Deployment", "StatefulSet"):
                yield where, manifest["spec"]["template"]


class Helm:
    """The program, on this chart."""

    def __init__(self, program: str) -> None:
        self._program = program

    def run(self, *arguments: str) -> str:
        """What it prints. Raises Refused."""
        done = subprocess.run(
            [self._program, *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
        )
        if done.returncode != 0:
            raise Refused(done.stdout + done.stderr)
        return done.stdout

    def render(self, scenario: str | None = None, *settings: str, apis: Sequence[str] = (MONITORING,)) -> Rendered:
        """The manifests with the values of a scenario and with NAME=VALUE settings; VALUE is JSON or a plain word.

        ``apis`` are those that the cluster has besides its own. Raises Refused.
        """
        files = [str(CHART / "ci" / f"{scenario}-values.yaml")] if scenario else []
        text = self._template(tuple(files), settings, tuple(apis))
        return _parsed(text)

    def render_file(self, values: Path) -> Rendered:
        """The manifests with the values of a file."""
        text = self._template((str(values),), (), (MONITORING,))
        return _parsed(text)

    @functools.cache  # noqa: B019 - one object per session
    def _template(self, files: tuple[str, ...], settings: tuple[str, ...], apis: tuple[str, ...]) -> str:
        arguments = [f"--values={file}" for file in files]
        arguments += [f"--set-json={_as_json(setting)}" for setting in settings]
        arguments += [f"--api-versions={api}" for api in apis]
        return self.run("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *arguments)


def _parsed(text: str) -> Rendered:
    # The loader in C: the same manifests are read by many tests.
    return Rendered(manifest for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader) if manifest)


def _as_json(setting: str) -> str:
    name, _, value = setting.partition("=")
    try:
        json.loads(value)
    except ValueError:
        value = json.dumps(value)
    return f"{name}={value}"


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether all labels that are asked for are there."""
    return bool(selector) and selector.items() <= labels.items()


def environment(container: Manifest, secrets: Mapping[str, str]) -> dict[str, str]:
    """The variables as the container sees them; ``secrets`` gives the content of each SECRET/KEY."""
    seen: dict[str, str] = {}
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            reference = variable["valueFrom"]["secretKeyRef"]
            value = secrets[f"{reference['name']}/{reference['key']}"]
        else:
            value = str(variable["value"])
            for name, earlier in seen.items():
                value = value.replace(f"$({name})", earlier)
        seen[variable["name"]] = value
    return seen
