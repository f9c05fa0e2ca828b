"""What every part of the configuration is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moorage_server import limits
from moorage_server.runtime import addresses


def _id(value: str) -> str:
    if not 1 <= len(value.encode()) <= limits.ID_BYTES:
        raise ValueError(f"must be 1 to {limits.ID_BYTES} bytes of UTF-8")
    return value


def empty_as_nothing(value: Any) -> Any:
    """``value``, or nothing at all for null: a YAML key whose children are all commented out reads as null."""
    return {} if value is None else value


Id = Annotated[str, Field(strict=True), BeforeValidator(lambda v: _id(v) if isinstance(v, str) else v)]
#: HOST:PORT.
Address = Annotated[str, AfterValidator(addresses.checked)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are final."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _from_null(cls, data: Any) -> Any:
        return empty_as_nothing(data)
