"""The part of the configuration that says who may call: TLS, credentials, and what each credential may do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from moorage_server.runtime.section import Id, Section, empty_as_nothing

Role = Literal["router", "collector", "operator", "viewer"]

#: Characters of the shortest token: 16 random ones can not be guessed.
LEAST_TOKEN = 16


class TlsSettings(Section):
    """Certificates. The files are read again when they change."""

    cert_file: str | None = Field(default=None, description="Certificate chain of the server, PEM; unset: no TLS.")
    key_file: str | None = Field(default=None, description="Its private key, PEM, without a passphrase.")
    client_ca_file: str | None = Field(
        default=None, description="CA certificates, PEM: clients need a certificate that one of these signed."
    )
    require_client_cert: bool | None = Field(
        default=None,
        description="Ask for client certificates, and refuse those without; unset: where client_ca_file is given.",
    )

    @model_validator(mode="after")
    def _whole(self) -> TlsSettings:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file needs cert_file and key_file")
        if self.require_client_cert and self.client_ca_file is None:
            raise ValueError("require_client_cert needs client_ca_file")
        return self

    @property
    def mutual(self) -> bool:
        """Whether only clients with a certificate get in."""
        return self.client_ca_file is not None and self.require_client_cert is not False


class RateLimit(Section):
    """A token bucket; each server process keeps its own."""

    calls_per_s: float = Field(gt=0, le=1_000_000, description="Calls per second in the long run.")
    burst: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Calls at once; unset: those of one second, at least one."
    )


class Grant(Section):
    """What a caller may do. Absent lists do not limit."""

    roles: tuple[Role, ...] = Field(min_length=1, description="router, collector, operator, viewer.")
    pools: tuple[Id, ...] | None = Field(default=None, min_length=1, description="Pools it may call for.")
    classes: tuple[Id, ...] | None = Field(default=None, min_length=1, description="Classes it may declare in Admit.")
    tenants: tuple[Id, ...] | None = Field(default=None, min_length=1, description="Tenants it may name in Admit.")
    rate_limit: RateLimit | None = Field(default=None, description="Calls per second; unset: no limit.")


class CertificateGrant(Grant):
    """What the holder of a client certificate may do."""

    name: Id | None = Field(default=None, description="Name in logs; unset: the certificate's.")


class Credential(Grant):
    """One entry of the credentials' file: a token, its hash, or the name in a certificate."""

    name: Id = Field(description="Name in logs. Entries of one name, such as an old and a new token, grant the same.")
    token: SecretStr | None = Field(default=None, min_length=LEAST_TOKEN, description="The token itself.")
    token_sha256: SecretStr | None = Field(default=None, description="SHA-256 of the token, 64 hexadecimal digits.")
    certificate: str | None = Field(default=None, min_length=1, description="SAN or CN of a client certificate.")

    @field_validator("token", "token_sha256", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        # YAML reads a token of digits as a number.
        if value is not None and not isinstance(value, str):
            raise ValueError("must be text; put it in quotes")
        return value

    @field_validator("token")
    @classmethod
    def _fit_for_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and any(not "!" <= character <= "~" for character in value.get_secret_value()):
            raise ValueError("must be printable ASCII without blanks")
        return value

    @field_validator("token_sha256")
    @classmethod
    def _digest(cls, value: SecretStr | None) -> SecretStr | None:
        digits = "" if value is None else value.get_secret_value().lower()
        if value is not None and (len(digits) != 64 or not set(digits) <= set("0123456789abcdef")):
            raise ValueError("must be 64 hexadecimal digits")
        return value

    @model_validator(mode="after")
    def _one_of_three(self) -> Credential:
        if sum(given is not None for given in (self.token, self.token_sha256, self.certificate)) != 1:
            raise ValueError("needs exactly one of token, token_sha256, certificate")
        return self


class AuthSettings(Section):
    """Who may call. With neither key every caller may do everything."""

    tokens_file: str | None = Field(
        default=None,
        description="YAML or JSON list of credentials; read again when it changes.",
    )
    certificates: Annotated[dict[Id, CertificateGrant], BeforeValidator(empty_as_nothing)] = Field(
        default_factory=dict, description="Callers by the SAN or CN of their certificate."
    )

    @property
    def on(self) -> bool:
        """Whether callers are told apart."""
        return self.tokens_file is not None or bool(self.certificates)
