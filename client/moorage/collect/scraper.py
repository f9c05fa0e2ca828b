"""HTTP to one engine, bounded in time and size."""

import asyncio
import json

import httpx

from moorage.collect.reader import EngineUnreachable, EngineUnreadable

# A page of a large engine is some hundred kB; more than this is not metrics.
MAX_BODY_BYTES = 8 * 1024 * 1024

# Compression would cost the engine's front end more than the bytes do on the wire.
HEADERS = {"Accept-Encoding": "identity"}


class EndpointAbsent(Exception):
    """The engine does not have this endpoint, or keeps it to itself (401, 403, 404, 405, 501)."""


class Scraper:
    """GETs below one base URL. `http` is shared with the scrapers of other engines and must not limit connections."""

    def __init__(self, http: httpx.AsyncClient, endpoint: str) -> None:
        self._http = http
        self._endpoint = endpoint

    async def text(self, path: str, timeout: float) -> str:
        """Body of `path`, within `timeout` seconds in all (a slow drip of bytes does not stretch it).

        Raises EngineUnreachable, EngineUnreadable, or EndpointAbsent.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._get(path, timeout)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EngineUnreachable(f"no answer to {path} in {timeout:.2f} s") from error
        except httpx.RequestError as error:
            raise EngineUnreachable(f"{type(error).__name__} at {path}: {error}", _is_refusal(error)) from error

    async def json(self, path: str, timeout: float) -> object:
        """Decoded body of `path`; raises as `text` does."""
        body = await self.text(path, timeout)
        try:
            answer: object = json.loads(body)
        except ValueError as error:
            raise EngineUnreadable(f"{path} is not JSON: {error}") from error
        return answer

    async def _get(self, path: str, timeout: float) -> str:
        body = bytearray()
        async with self._http.stream("GET", self._endpoint + path, headers=HEADERS, timeout=timeout) as response:
            if response.status_code in (401, 403, 404, 405, 501):
                raise EndpointAbsent(f"{path} answers {response.status_code}")
            if response.status_code != httpx.codes.OK:
                raise EngineUnreadable(f"{path} answers {response.status_code}")
            if response.headers.get("Content-Encoding", "identity") != "identity":
                # What was not asked for may unpack to any size.
                raise EngineUnreadable(f"{path} answers compressed")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise EngineUnreadable(f"{path} is larger than {MAX_BODY_BYTES} bytes")
        return body.decode("utf-8", errors="replace")


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a connection was refused, somewhere down the causes: each library on the way wraps them anew."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(_is_refusal(member) for member in error.exceptions)
        error = error.__cause__ or error.__context__
    return False
