"""Holds and decisions in words: what each reason means, what releases a session, and the line a decision prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from moorage.cli.cells import age, cell, duration, enum_name, printable, seconds

if TYPE_CHECKING:
    from moorage.v1.scheduler_pb2 import AdmitResponse, Hold, PlaceResponse

#: Reason: (what it means, what releases the session).
REASONS = {
    "<unknown>": (
        "nothing holds it any more",
        "its caller asks again",
    ),
    "POOL_CAP": (
        "every usable instance is at its session cap",
        "a session ends, or the cap rises",
    ),
    "CLASS_CAP": (
        "its class is at its quota, and another class waits below its own",
        "a session of its class ends, or the other classes catch up",
    ),
    "KV_BUDGET": (
        "the forecast of held KV blocks leaves no room for it",
        "sessions end and free enough blocks, or the brake lets go",
    ),
    "NO_INSTANCE": (
        "no instance of the pool is known, alive and open",
        "an instance reports (`moorage get instances` shows which do)",
    ),
    "STALE_SNAPSHOT": (
        "snapshots are too old to prove that it fits",
        "an instance reports again",
    ),
    "DRAINING": (
        "the usable instances are draining, cordoned or stopped",
        "an instance opens (`moorage uncordon INSTANCE`) or joins",
    ),
    "QUEUED_BEHIND": (
        "others that came before, or whose class is further behind its target, go first",
        "those ahead have been placed",
    ),
    "STALENESS_LIMIT": (
        "its policy version lags too far behind to be useful",
        "it asks again with a newer policy version (or max_policy_lag is raised)",
    ),
    "WEIGHT_UPDATE": (
        "weights are being updated",
        "the update ends (`moorage weights end VERSION` where its trainer died)",
    ),
    "TOO_LARGE": (
        "it alone is larger than any instance's budget or context limit",
        "a larger instance joins, or the session is made smaller",
    ),
    "CLASS_REFUSED": (
        "its class is refused by configuration",
        "the class is allowed again (`moorage config class NAME --allow`)",
    ),
}


def reason(hold: Hold) -> str:
    """Short name of the reason, such as KV_BUDGET."""
    return enum_name(hold, "reason")


def words(value: str) -> str:
    """A value behind `key=`, quoted where it holds spaces, quotes or nothing."""
    text = printable(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=') else text


def hold_pairs(hold: Hold) -> str:
    """A hold as key=value pairs on one line; values that do not apply are left out."""
    pairs = [f"reason={reason(hold)}"]
    if hold.position:
        pairs += [f"position={hold.position}", f"ahead={hold.ahead}"]
    if hold.HasField("retry_after"):
        pairs.append(f"retry-after={duration(hold, 'retry_after')}")
    if hold.detail:
        pairs.append(f"detail={words(hold.detail)}")
    return " ".join(pairs)


def decision_line(session_id: str, answer: AdmitResponse | PlaceResponse, verb: str) -> str:
    """The line for a decision: `session/s1 placed instance=vllm-0 ...`; `verb` names the success."""
    name = f"session/{cell(session_id)}"
    decision = enum_name(answer, "decision")
    if decision != "PLACE":
        done = {"HOLD": "held", "REJECT": "rejected"}.get(decision, f"answered {decision}")
        return f"{name} {done} {hold_pairs(answer.hold)}"
    to, lease = answer.placement, answer.lease
    pairs = [f"instance={words(to.instance_id)}", f"rank={to.dp_rank}", f"endpoint={words(to.endpoint)}"]
    if lease.token:
        pairs.append(f"lease-token={words(lease.token)}")
    if lease.HasField("ttl"):
        pairs.append(f"ttl={age(seconds(lease.ttl))}")
    if answer.HasField("hold"):
        pairs.append(f"observed-hold={reason(answer.hold)}")
    return f"{name} {verb} {' '.join(pairs)}"
