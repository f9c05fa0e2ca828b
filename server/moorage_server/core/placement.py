"""Where a session goes: lowest estimated time to first token (policy.md section 3, *Placement*).

c_rw = d_w + (L_r - H_rw) / mu_w, with prompt length L_r, reusable prefix H_rw, prefill backlog delay d_w and measured
prefill throughput mu_w.
"""

from __future__ import annotations

from moorage_server.core.view import Ask, Instance

#: Prefill throughput of an instance that has not shown any yet, tokens per second.
UNKNOWN_PREFILL_RATE = 8000.0
#: Costs closer than this are equal: the emptier instance wins, not the noise of the estimate.
SAME_COST_S = 0.05


def reusable_prefix(ask: Ask, instance: Instance) -> int:
    """H_rw in tokens: what the samples of the same prompt already hold on the instance."""
    if ask.prompt_tokens is None or not ask.group_id:
        return 0
    return min(ask.prompt_tokens, instance.groups.get(ask.group_id, 0) * instance.block_size)


def cost_s(ask: Ask, instance: Instance) -> float:
    """c_rw in seconds. An unknown prompt costs the same everywhere."""
    rate = instance.prefill_rate or UNKNOWN_PREFILL_RATE
    tokens = 0 if ask.prompt_tokens is None else ask.prompt_tokens - reusable_prefix(ask, instance)
    return (instance.backlog_blocks * instance.block_size + tokens) / rate


def fill(instance: Instance) -> float:
    """How full an instance is: the forecast need against its budget, or its sessions where no budget is known."""
    if instance.budget and instance.need:
        return max(instance.need[:-1]) / instance.budget
    return float(instance.sessions)


def ranked(ask: Ask, instances: list[Instance]) -> list[Instance]:
    """The instances, best first."""
    return sorted(instances, key=lambda i: (round(cost_s(ask, i) / SAME_COST_S), fill(i), i.key))
