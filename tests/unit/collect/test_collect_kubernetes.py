"""Pods by label selector, against a server that plays the API's pod list. Crafted from the API's public shape."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from moorage.collect.discovery import DiscoveryFailed
from moorage.collect.kubernetes import PAGE_PODS, ClusterAccess, KubernetesDiscovery
from moorage.collect.targets import Target


def pod(name: str, ip: str = "10.0.0.1", ready: str = "True", ending: bool = False) -> dict[str, object]:
    """A pod as the API lists it, as far as it matters, and a little further."""
    metadata = {"name": name, "namespace": "rl", "labels": {"app": "vllm"}, "uid": "u"}
    if ending:
        metadata["deletionTimestamp"] = "2026-11-30T08:41:40Z"
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastProbeTime": None},
        {"type": "ContainersReady", "status": ready},
        {"type": "Ready", "status": ready},
    ]
    status = {"phase": "Running", "hostIP": "192.0.2.1", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}
    return {"metadata": metadata, "spec": {"containers": [{"name": "vllm"}]}, "status": status}


class FakeApi:
    """Lists `pods`, in pages of `limit`. `status` other than 200, or a `body`, is answered instead."""

    def __init__(self) -> None:
        self.pods: list[dict[str, object]] = []
        self.status = 200
        self.body: str | None = None
        self.asked: list[tuple[str, dict[str, list[str]], str]] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        url = urlsplit(head.split()[1])
        query = parse_qs(url.query)
        token = next((line for line in head.splitlines() if line.lower().startswith("authorization:")), "")
        self.asked.append((url.path, query, token.partition(" ")[2]))
        body = (self.body if self.body is not None else self._list(query)).encode()
        writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(body)
        await writer.drain()
        writer.close()

    def _list(self, query: dict[str, list[str]]) -> str:
        start, limit = int(query.get("continue", ["0"])[0]), int(query["limit"][0])
        end = start + limit
        metadata = {"resourceVersion": "1"} | ({"continue": str(end)} if end < len(self.pods) else {})
        return json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": self.pods[start:end]})


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield fake
    server.close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("rl")
    return tmp_path


@pytest.fixture
def discovery(api: FakeApi, account: Path) -> KubernetesDiscovery:
    return KubernetesDiscovery(ClusterAccess(api.url, account), "app=vllm,tier in (a, b)", 8000)


async def test_ready_pods_are_engines(api: FakeApi, discovery: KubernetesDiscovery) -> None:
    api.pods = [
        pod("vllm-1", "10.0.0.2"),
        pod("vllm-0"),
        pod("vllm-6", "fd00::7"),
        pod("starting", ready="False"),
        pod("ending", ending=True),
        pod("pending", ip=""),
    ]
    assert await discovery.find() == [
        Target("vllm-0", "http://10.0.0.1:8000"),
        Target("vllm-1", "http://10.0.0.2:8000"),
        Target("vllm-6", "http://[fd00::7]:8000"),
    ]
    [(path, query, token)] = api.asked
    assert path == "/api/v1/namespaces/rl/pods"
    assert query == {"labelSelector": ["app=vllm,tier in (a, b)"], "limit": [str(PAGE_PODS)]}
    assert token == "Bearer first"
    assert discovery.name == "pods app=vllm,tier in (a, b) in rl"


async def test_no_ready_pod_is_an_answer(api: FakeApi, discovery: KubernetesDiscovery) -> None:
    assert await discovery.find() == []
    api.pods = [pod("starting", ready="False")]
    assert await discovery.find() == []


async def test_long_lists_come_in_pages(api: FakeApi, discovery: KubernetesDiscovery) -> None:
    api.pods = [pod(f"p{number}", f"10.0.{number // 250}.{number % 250 + 1}") for number in range(2 * PAGE_PODS + 1)]
    assert len(await discovery.find()) == 2 * PAGE_PODS + 1
    assert [query.get("continue") for _, query, _ in api.asked] == [None, [str(PAGE_PODS)], [str(2 * PAGE_PODS)]]
    assert {query["labelSelector"][0] for _, query, _ in api.asked} == {"app=vllm,tier in (a, b)"}


async def test_a_renewed_token_is_used(api: FakeApi, discovery: KubernetesDiscovery, account: Path) -> None:
    await discovery.find()
    (account / "token").write_text("second")
    await discovery.find()
    assert [token for *_, token in api.asked] == ["Bearer first", "Bearer second"]


async def test_another_namespace(api: FakeApi, account: Path) -> None:
    discovery = KubernetesDiscovery(ClusterAccess(api.url, account), "app=vllm", 30000, "other/../x")
    api.pods = [pod("a")]
    assert await discovery.find() == [Target("a", "http://10.0.0.1:30000")]
    assert api.asked[0][0] == "/api/v1/namespaces/other%2F..%2Fx/pods"


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (403, '{"kind":"Status","message":"pods is forbidden"}', "may not list pods: 403 .*pods is forbidden"),
        (401, "", "may not list pods: 401"),
        (410, "the continue token expired", "answers 410"),
        (500, "", "answers 500"),
        (200, "<html>", "something else than JSON"),
        (200, "[]", "something else than a list of pods"),
        (200, '{"kind":"Pod"}', "something else than a list of pods"),
    ],
)
async def test_answers_that_name_no_pods_are_failures(
    api: FakeApi, discovery: KubernetesDiscovery, status: int, body: str, complaint: str
) -> None:
    api.status, api.body = status, body
    with pytest.raises(DiscoveryFailed, match=complaint):
        await discovery.find()


@pytest.mark.parametrize("odd", [None, [], 1, {}, {"metadata": 1, "status": []}, {"metadata": {"name": "a"}}])
async def test_odd_pods_are_passed_over(api: FakeApi, discovery: KubernetesDiscovery, odd: object) -> None:
    api.body = json.dumps({"items": [odd, pod("a"), {"metadata": {"name": "b"}, "status": {"podIP": "h"}}]})
    assert [target.instance_id for target in await discovery.find()] == ["a"]


async def test_no_api_no_token_and_no_ca_are_failures(account: Path) -> None:
    with pytest.raises(DiscoveryFailed, match=r"ConnectError at http://127\.0\.0\.1:9"):
        await KubernetesDiscovery(ClusterAccess("http://127.0.0.1:9", account), "a=b", 1).find()
    with pytest.raises(DiscoveryFailed, match="service account"):
        await KubernetesDiscovery(ClusterAccess("https://127.0.0.1:9", account), "a=b", 1).find()
    (account / "ca.crt").write_text("not a certificate")
    with pytest.raises(DiscoveryFailed, match="service account"):
        await KubernetesDiscovery(ClusterAccess("https://127.0.0.1:9", account), "a=b", 1).find()
    discovery = KubernetesDiscovery(ClusterAccess("http://127.0.0.1:9", account), "a=b", 1)
    (account / "token").unlink()
    with pytest.raises(DiscoveryFailed, match="service account"):
        await discovery.find()


def test_what_a_pod_has(account: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert ClusterAccess.from_pod(environment, account).api == "https://10.96.0.1:6443"
    assert ClusterAccess.from_pod({"KUBERNETES_SERVICE_HOST": "fd00::1"}, account).api == "https://[fd00::1]:443"
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_HOST is not set"):
        ClusterAccess.from_pod({}, account)
    (account / "token").unlink()
    with pytest.raises(ValueError, match="no service account token"):
        ClusterAccess.from_pod(environment, account)
    (account / "namespace").unlink()
    with pytest.raises(ValueError, match="no namespace given"):
        KubernetesDiscovery(ClusterAccess("http://h", account), "a=b", 1)
