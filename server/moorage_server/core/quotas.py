"""How an instance's protected KV budget is shared between classes (policy.md section 3, layers 2 and 3).

The product divides, the measurement limits (note 2): these shares say whose turn it is, ``forecast`` and ``pressure``
say how much there is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quota:
    """M_wb in blocks, and K_wb in sessions."""

    blocks: float
    sessions: int


def shares(
    capacity: float,
    demand: Mapping[str, float],
    footprint: Mapping[str, float],
    residency: Mapping[str, float] | None = None,
) -> dict[str, Quota]:
    """Quotas of the classes with demand on one instance.

    ``capacity`` is C_w in blocks, ``demand`` N_wb in sessions, ``footprint`` kbar_b in blocks. With ``residency``
    (That_b in seconds) the shares are R_wb = N_wb kbar_b That_b (`misa-t`), without it S_wb = N_wb kbar_b (`misa`);
    M_wb = C_w share / sum of shares, K_wb = max(1, floor(M_wb / kbar_b)). Residency changes only the share: kbar_b
    converts blocks to sessions in both.
    """
    weights = {
        name: n * footprint[name] * (1.0 if residency is None else residency[name])
        for name, n in demand.items()
        if n > 0
    }
    total = math.fsum(weights.values())
    if total <= 0:
        return {}
    quotas = {}
    for name, weight in weights.items():
        blocks = capacity * weight / total
        quotas[name] = Quota(blocks, max(1, math.floor(blocks / footprint[name])))
    return quotas
