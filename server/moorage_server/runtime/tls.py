"""The server's certificates: read, checked, and handed to gRPC at every handshake that follows a change."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from moorage_server.runtime.security_settings import TlsSettings
from moorage_server.runtime.settings_sources import SettingsError


class ServerCertificates:
    """The certificates in force. Connections keep those they began with; new ones get the newest.

    Raises SettingsError where the files are unusable, at the beginning as in :meth:`reload`.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._newest: grpc.ServerCertificateConfiguration | None = None
        self._first = self._read()

    def reload(self) -> None:
        """Takes what the files hold now."""
        self._newest = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """What a server listens with."""
        # The stubs do not know that the fetcher may answer None.
        fetch: Any = self._fetch
        return grpc.dynamic_ssl_server_credentials(
            self._first, fetch, require_client_authentication=self._settings.mutual
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        # gRPC asks at each handshake, in a thread of its own; None says that nothing changed.
        newest, self._newest = self._newest, None
        return newest

    def _read(self) -> grpc.ServerCertificateConfiguration:
        settings = self._settings
        certificate, key = _content("cert_file", settings.cert_file), _content("key_file", settings.key_file)
        authorities = _content("client_ca_file", settings.client_ca_file) if settings.mutual else None
        _check(settings)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authorities)


def _content(key: str, name: str | None) -> bytes:
    try:
        return Path(name or "").read_bytes()
    except OSError as error:
        raise SettingsError(f"tls.{key}: {name}: can not be read: {error.strerror}") from None


def _check(settings: TlsSettings) -> None:
    """gRPC would take unusable files without a word, and fail every handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password of ours OpenSSL would ask for one at the terminal.
        context.load_cert_chain(settings.cert_file or "", settings.key_file, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise SettingsError(
            f"tls.cert_file, tls.key_file: {settings.cert_file}, {settings.key_file}: no certificate in PEM and its"
            f" key without a passphrase: {_reason(error)}"
        ) from None
    if settings.mutual:
        try:
            context.load_verify_locations(settings.client_ca_file)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise SettingsError(
                f"tls.client_ca_file: {settings.client_ca_file}: no certificates in PEM: {_reason(error)}"
            ) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or type(error).__name__)
