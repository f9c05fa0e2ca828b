"""Where the ledger lives, as the configuration says it: one Redis, a primary that sentinels name, or a Cluster."""

from __future__ import annotations

from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, SecretStr, model_validator

from moorage_server.runtime.section import Address, Section


def _listed(value: Any) -> Any:
    """A list as a variable holds it: separated by commas, or YAML."""
    if not isinstance(value, str):
        return () if value is None else value
    text = value.strip()
    if not text.startswith("- ") and not (text.startswith("[") and text.endswith("]")):
        return [part.strip() for part in text.split(",")]
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError("must be a list, separated by commas or in YAML") from None


class RedisSettings(Section):
    """Where the ledger lives."""

    url: SecretStr | None = Field(
        default=None, description="Redis or Valkey, 7 or later; may hold a password. Never printed."
    )
    embedded: bool | None = Field(
        default=None,
        description="Keep the ledger in this process; it is lost at exit. The default where nothing else is named.",
    )
    sentinels: Annotated[tuple[Address, ...], BeforeValidator(_listed)] = Field(
        default=(),
        description="Sentinels, a list of HOST:PORT. Of the url only user, password, database and TLS count then.",
    )
    master_name: str | None = Field(default=None, min_length=1, description="Name of the primary at the sentinels.")
    cluster: bool = Field(default=False, description="The url is one of the nodes of a Cluster.")
    key_prefix: str = Field(
        default="moorage",
        pattern=r"^[^{}\s]{1,64}$",
        description="Beginning of every key: 1 to 64 characters, no braces, no blanks.",
    )

    @model_validator(mode="after")
    def _one_store(self) -> RedisSettings:
        for name in ("url", "sentinels", "cluster"):
            if self.embedded and getattr(self, name):
                raise ValueError(f"{name} and embedded exclude each other")
        if self.cluster and self.sentinels:
            raise ValueError("sentinels and cluster exclude each other: a Cluster fails over by itself")
        if self.sentinels and self.master_name is None:
            raise ValueError("master_name is needed with sentinels")
        if self.master_name is not None and not self.sentinels:
            raise ValueError("sentinels are needed with master_name")
        if self.cluster and self.url is None:
            raise ValueError("url, of one of the nodes, is needed with cluster")
        if self.embedded is False and self.url is None and not self.sentinels:
            raise ValueError("url is needed where embedded is false")
        return self
