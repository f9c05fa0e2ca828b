"""Runs a proxy until it is told to stop, then lets its requests finish."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from aiohttp import web

from moorage import AsyncClient
from moorage.credentials import is_local
from moorage.proxy.app import Front
from moorage.proxy.forward import Forwarder
from moorage.proxy.identity import Identifier
from moorage.proxy.log import line, logger, tell_bad_requests_in_a_line
from moorage.proxy.placing import Placer
from moorage.proxy.pool import PoolView
from moorage.proxy.sessions import SessionBook
from moorage.proxy.settings import ProxySettings
from moorage.proxy.tokens import TokenGate
from moorage.proxy.upstream import Upstream

SWEEP_S = 0.5
#: How long the start waits for the control plane, in seconds: who asks at once shall not be told that it is away.
_FIRST_LOOK_S = 1.0
#: Between two requests of one client connection, in seconds.
_CLIENT_KEEPALIVE_S = 75.0


async def run(settings: ProxySettings, *, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
    """Serves until `stop` is set; then new requests are refused, and running ones have their grace.

    `on_ready` gets the address, HOST:PORT, once it listens. Raises ValueError on settings that make no sense, and
    OSError where it can not listen.
    """
    gate = TokenGate(settings.require_token_file) if settings.require_token_file else None
    proof = settings.proof
    async with AsyncClient(
        settings.server,
        pool=settings.pool,
        token=proof.token,
        token_file=proof.token_file,
        tls=proof.tls,
        ca=proof.ca,
        cert=proof.cert,
        key=proof.key,
        plaintext_token=proof.plaintext_token,
        on_unavailable=settings.on_unavailable,
        fallback=settings.fallback or None,
    ) as client:
        upstream, pool = Upstream(settings.timeouts), PoolView(client)
        book = SessionBook(client, max_hold_s=settings.max_hold, lease_s=settings.lease)
        identifier = Identifier(settings.rules, settings.session_headers, settings.session_fields)
        forwarder = Forwarder(identifier, book, upstream, pool, settings.retries)
        placer = Placer(identifier, book, pool)
        front = Front(forwarder, placer, book, upstream, pool, gate, has_fallback=bool(settings.fallback))
        tell_bad_requests_in_a_line()
        # A client that goes away cancels its request, and so the engine's.
        runner = web.AppRunner(
            front.application(settings.max_body),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_CLIENT_KEEPALIVE_S,
            shutdown_timeout=0.1,
        )
        tasks = [asyncio.create_task(pool.watch()), asyncio.create_task(book.sweep(SWEEP_S))]
        try:
            await runner.setup()
            host, port = settings.address()
            site = web.TCPSite(runner, host, port)
            await site.start()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_LOOK_S):
                    await pool.looked.wait()
            host, port = runner.addresses[0][:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if gate is None and not is_local(address):
                logger.warning(line("open_to_all", address=address, hint="--require-token-file"))
            on_ready(address)
            await stop.wait()
            front.draining = True
            logger.info(line("draining", requests=front.active, sessions=len(book), grace_s=settings.grace))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.grace):
                    await front.quiet.wait()
        finally:
            for task in tasks:
                task.cancel()
            await runner.cleanup()
            await book.close(leave=settings.leave_sessions)
            await upstream.close()
