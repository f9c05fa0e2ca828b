"""TLS and callers of one server process, read at the start and again whenever their files change."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import grpc
import structlog

from moorage_server.api.callers import Callers
from moorage_server.api.guard import Guard
from moorage_server.runtime.credentials import read_callers
from moorage_server.runtime.settings import Settings
from moorage_server.runtime.settings_sources import SettingsError
from moorage_server.runtime.tls import ServerCertificates

#: Seconds between two looks at the files.
LOOK_EVERY_S = 1.0

_log = structlog.get_logger("moorage.auth")


class Security:
    """Who gets in. Raises SettingsError where the files are unusable at the start; later such files change nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watched: list[WatchedFiles] = []
        self._certificates: ServerCertificates | None = None
        #: None where callers are not told apart.
        self.guard: Guard | None = None
        tls, auth = settings.tls, settings.auth
        # Watched before they are read: a change in between is seen as one.
        if tls.cert_file is not None:
            files = [name for name in (tls.cert_file, tls.key_file, tls.client_ca_file) if name is not None]
            self._watched.append(WatchedFiles("certificates", files, self._reload_certificates))
            self._certificates = ServerCertificates(tls)
        if auth.on:
            files = [] if auth.tokens_file is None else [auth.tokens_file]
            self._watched.append(WatchedFiles("credentials", files, self._reload_callers))
            self.guard = Guard(self._callers())

    def bind(self, server: grpc.aio.Server) -> int:
        """Takes the address to listen on; the port, or 0. Raises RuntimeError where it can not be had."""
        if self._certificates is None:
            return server.add_insecure_port(self._settings.listen)
        return server.add_secure_port(self._settings.listen, self._certificates.credentials())

    def look(self) -> None:
        """Takes what changed in the files; one that is unusable leaves what was there, with a line in the log."""
        for files in self._watched:
            files.look()

    async def follow(self) -> None:
        """Looks at the files for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def facts(self) -> dict[str, object]:
        """How callers get in, for the log."""
        tls = "off" if self._certificates is None else "mutual" if self._settings.tls.mutual else "on"
        return {"tls": tls, "callers": None if self.guard is None else len(self.guard.callers)}

    def warn(self) -> None:
        """Logs what is risky about how callers get in."""
        settings = self._settings
        if settings.on_loopback:
            return
        if self.guard is None and not settings.tls.mutual:
            _log.warning("whoever reaches this server may do everything: insecure_listen")
        elif self._certificates is None:
            _log.warning("tokens travel in clear text: give tls.cert_file, or have TLS in front of this server")

    def _callers(self) -> Callers:
        callers = read_callers(self._settings.auth)
        if callers.certificates and not self._settings.tls.mutual:
            name = min(callers.certificates)
            raise SettingsError(
                f"auth: an entry names the certificate {name!r}, but clients are asked for none: give"
                " tls.client_ca_file (with tls.cert_file and tls.key_file), and tls.require_client_cert unset or true"
            )
        if len(callers) == 0:
            _log.warning("no credential is known: every call will be refused")
        return callers

    def _reload_callers(self) -> None:
        if self.guard is not None:
            self.guard.callers = self._callers()

    def _reload_certificates(self) -> None:
        if self._certificates is not None:
            self._certificates.reload()


class WatchedFiles:
    """Files that are read again, all of them, when one of them changed."""

    def __init__(self, what: str, files: Sequence[str], reload: Callable[[], None]) -> None:
        self._what = what
        self._files = files
        self._reload = reload
        self._seen = self._stamps()

    def look(self) -> None:
        """Calls ``reload`` where a file is another one than before; a SettingsError of it is logged."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._reload()
        except SettingsError as error:
            _log.warning("unusable files: the old ones stay in force", what=self._what, problems=list(error.problems))
        else:
            _log.info("read again", what=self._what)

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(name) for name in self._files]


def _stamp(name: str) -> tuple[int, int, int] | None:
    """What changes with a file's content: also where links are swapped, as Kubernetes does; None where it is gone."""
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
