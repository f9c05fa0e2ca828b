"""The engines' side: one HTTP request to where the control plane said."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import aiohttp

from moorage.proxy.errors import ProxyError
from moorage.proxy.settings import Timeouts

#: Less than the 5 s after which the engines' HTTP server (uvicorn) closes idle connections, so that no request runs
#: into a closing one.
KEEPALIVE_S = 4.0
#: What is read ahead of a slow client, in bytes; aiohttp stops reading at twice that.
BUFFER_BYTES = 64 << 10


class Refused(Exception):
    """No connection: nothing was sent, and another engine may be tried."""


class Limit:
    """Bounds the parts of one exchange, and the whole, with one timer.

    Example:
        >>> async with Limit(total=60.0) as limit:  # doctest: +SKIP
        ...     limit.allow(5.0)
        ...     chunk = await answer.content.readany()
        ...     limit.allow(None)
    """

    def __init__(self, total: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = math.inf if total is None else self._loop.time() + total
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.allow(None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, traceback)

    def allow(self, seconds: float | None) -> None:
        """From now on so long, and not beyond the whole."""
        until = self._end if seconds is None else min(self._end, self._loop.time() + seconds)
        self._timeout.reschedule(None if until == math.inf else until)


class Upstream:
    """Connections to engines, kept between requests. Made inside the loop that uses it."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,
            read_bufsize=BUFFER_BYTES,
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.close()

    async def send(
        self, method: str, endpoint: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Sends a request; the answer's head is there, its body is not. Close it, or read it to its end.

        Raises Refused, or ProxyError where the engine breaks the connection.
        """
        url = f"{base_url(endpoint)}{path}"
        try:
            return await self._http.request(method, url, headers=headers, data=body, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Refused(f"{endpoint}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise broken(endpoint, error) from error


def base_url(endpoint: str) -> str:
    """The endpoint as a snapshot gave it, as a URL without a slash at its end.

    Example:
        >>> base_url("10.0.0.7:8000"), base_url("http://gpu2:8000/")
        ('http://10.0.0.7:8000', 'http://gpu2:8000')
    """
    return (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")


def broken(endpoint: str, error: Exception) -> ProxyError:
    """The engine took the request and did not answer it to its end."""
    return ProxyError(
        502, f"engine {endpoint} broke the connection: {error}", kind="api_error", code="engine_disconnected"
    )


def too_slow(endpoint: str) -> ProxyError:
    """The engine took too long."""
    return ProxyError(504, f"engine {endpoint} did not answer in time", kind="api_error", code="engine_timeout")
