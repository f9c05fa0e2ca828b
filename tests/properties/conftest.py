"""The servers that the contract is tested with."""

from tests.contract.conftest import planes

__all__ = ["planes"]
