"""Engines in the pods that a label selector matches, listed through the Kubernetes API again and again."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx

from moorage.collect.discovery import DiscoveryFailed
from moorage.collect.targets import Target, target_at

# Where Kubernetes puts the credentials of a pod's service account.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

# Pods per answer, and answers per look: a pod takes some 10 kB, and nobody runs more engines than this.
PAGE_PODS = 100
MAX_PAGES = 100


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The base URL of the API, and the directory with the service account's `token`, `ca.crt` and `namespace`."""

    api: str
    account: Path = SERVICE_ACCOUNT

    @classmethod
    def from_pod(cls, environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> "ClusterAccess":
        """What a pod has. Raises ValueError outside of one."""
        host = environment.get("KUBERNETES_SERVICE_HOST")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("no Kubernetes API: KUBERNETES_SERVICE_HOST is not set (a selector works inside a pod)")
        if not (account / "token").is_file():
            raise ValueError(f"no Kubernetes API: the pod has no service account token ({account / 'token'})")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", account)

    def namespace(self) -> str:
        """The pod's own namespace. Raises ValueError where it is not known."""
        try:
            return (self.account / "namespace").read_text().strip()
        except OSError as error:
            raise ValueError(f"no namespace given, and none in {self.account}: {error}") from error

    def client(self) -> httpx.AsyncClient:
        """A client with the token and the CA as they are now: Kubernetes renews both. Raises OSError."""
        token = (self.account / "token").read_text().strip()
        verify: ssl.SSLContext | bool = True
        if self.api.startswith("https:"):
            verify = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        return httpx.AsyncClient(
            base_url=self.api, headers={"Authorization": f"Bearer {token}"}, verify=verify, trust_env=False
        )


class KubernetesDiscovery:
    """One engine at `port` of each pod that is ready and not about to end. Instances are called as their pods."""

    def __init__(self, access: ClusterAccess, selector: str, port: int, namespace: str | None = None) -> None:
        """`namespace` is the pod's own unless given. Raises ValueError where neither is known."""
        self._access = access
        self._selector = selector
        self._port = port
        self._namespace = namespace or access.namespace()

    @property
    def name(self) -> str:
        """See Discovery."""
        return f"pods {self._selector} in {self._namespace}"

    async def find(self) -> Sequence[Target]:
        """See Discovery. No ready pod at all is an answer, not a failure."""
        try:
            async with self._access.client() as http:
                pods = await self._list(http)
        except httpx.HTTPError as error:
            raise DiscoveryFailed(f"{type(error).__name__} at {self._access.api}: {error}") from error
        except OSError as error:
            raise DiscoveryFailed(f"the service account can not be used: {error}") from error
        ready = [found for pod in pods if (found := _ready(pod)) is not None]
        return [target_at(address, self._port, name) for name, address in sorted(ready)]

    async def _list(self, http: httpx.AsyncClient) -> list[object]:
        pods: list[object] = []
        parameters = {"labelSelector": self._selector, "limit": str(PAGE_PODS)}
        for _ in range(MAX_PAGES):
            response = await http.get(f"/api/v1/namespaces/{quote(self._namespace, safe='')}/pods", params=parameters)
            items, after = _page_of(response)
            pods += items
            if not after:
                return pods
            parameters["continue"] = after
        raise DiscoveryFailed(f"more than {PAGE_PODS * MAX_PAGES} pods match {self._selector}")


def _page_of(response: httpx.Response) -> tuple[list[object], str]:
    """Pods of one answer, and where the next one goes on ("" at the end)."""
    if response.status_code in (401, 403):
        raise DiscoveryFailed(f"the service account may not list pods: {response.status_code} {response.text[:300]}")
    if response.status_code != httpx.codes.OK:
        raise DiscoveryFailed(f"the Kubernetes API answers {response.status_code} {response.text[:300]}")
    try:
        answer = response.json()
    except ValueError as error:
        raise DiscoveryFailed(f"the Kubernetes API answers something else than JSON: {error}") from error
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list):
        raise DiscoveryFailed("the Kubernetes API answers something else than a list of pods")
    after = _part(answer, "metadata").get("continue")
    return items, after if isinstance(after, str) else ""


def _ready(pod: object) -> tuple[str, str] | None:
    """Name and address of a pod that takes requests, else None. One that is being deleted does not, even while it
    still says that it is ready.
    """
    metadata, status = _part(pod, "metadata"), _part(pod, "status")
    name, address, conditions = metadata.get("name"), status.get("podIP"), status.get("conditions")
    if not isinstance(name, str) or not isinstance(address, str) or not address or not isinstance(conditions, list):
        return None
    ready = any(isinstance(c, dict) and c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return (name, address) if ready and "deletionTimestamp" not in metadata else None


def _part(of: object, key: str) -> Mapping[str, object]:
    part = of.get(key) if isinstance(of, dict) else None
    return part if isinstance(part, dict) else {}
