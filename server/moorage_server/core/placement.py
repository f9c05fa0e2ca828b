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
#: The cost ends with the first token, and those who share an engine slow each other down after it. So an instance that
#: is fuller than the emptiest by more than this share of its budget is charged this much per budget, in seconds.
_CROWDED, _CROWDED_S = 0.25, 0.4


def reusable_prefix(ask: Ask, instance: Instance, class_prefix: int = 0) -> int:
    """H_rw in tokens: the most that is known of the prompt on the instance.

    That is what was looked up or what the session itself left there (``ask.reusable``), what the samples of the same
    prompt hold, and the ``class_prefix`` (tokens that all prompts of the class begin with) where a session of the class
    is at home. Of a prompt of unknown length only the first counts.
    """
    known = ask.reusable.get(instance.key, 0)
    if ask.prompt_tokens is None:
        return known
    group = instance.groups.get(ask.group_id, 0) * instance.block_size if ask.group_id else 0
    # Only whole blocks are shared.
    common = class_prefix // instance.block_size * instance.block_size
    of_class = common if instance.by_class.get(ask.workload_class, 0) > 0 else 0
    return min(ask.prompt_tokens, max(known, group, of_class))


def cost_s(ask: Ask, instance: Instance, class_prefix: int = 0) -> float:
    """c_rw in seconds. An unknown prompt adds the same everywhere, which is left out."""
    rate = instance.prefill_rate or UNKNOWN_PREFILL_RATE
    tokens = (ask.prompt_tokens or 0) - reusable_prefix(ask, instance, class_prefix)
    return (instance.backlog_blocks * instance.block_size + tokens) / rate


def fill(instance: Instance) -> float:
    """How full an instance is: the forecast need against its budget, or its sessions where no budget is known."""
    if instance.budget and instance.need:
        return max(instance.need[:-1]) / instance.budget
    return float(instance.sessions)


def ranked(ask: Ask, instances: list[Instance], class_prefix: int = 0) -> list[Instance]:
    """The instances, best first."""
    filled = {i.key: min(1.0, fill(i)) for i in instances if i.budget and i.need}
    emptiest = min(filled.values(), default=0.0)

    def rank(instance: Instance) -> tuple[int, float, str]:
        crowd = _CROWDED_S * max(0.0, filled.get(instance.key, 0.0) - emptiest - _CROWDED)
        return round((cost_s(ask, instance, class_prefix) + crowd) / SAME_COST_S), fill(instance), instance.key

    return sorted(instances, key=rank)
