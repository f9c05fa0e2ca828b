"""Why a session waits, and what would let it in, on the numbers of this moment (policy.md section 4, note 11)."""

from __future__ import annotations

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.api.answers import hold_of
from moorage_server.core import admission
from moorage_server.core.view import Ask, Pool
from moorage_server.runtime.arrivals import unknown_class
from moorage_server.store.records import OnHold, SessionRecord

#: What has to happen, by reason; completes "enters when ...".
RELEASED_BY = {
    admission.POOL_CAP: "a session ends on a full instance, or its cap rises",
    admission.CLASS_CAP: "a session of its class ends, its class's quota grows, or the other classes stop waiting",
    admission.KV_BUDGET: "blocks come free, by sessions that end or a forecast that falls",
    admission.NO_INSTANCE: "an instance registers or reports again",
    admission.STALE_SNAPSHOT: "an instance reports a fresh snapshot",
    admission.IS_DRAINING: "an instance is uncordoned or serves again",
    admission.QUEUED_BEHIND: "those before it have entered or gone",
    admission.STALENESS_LIMIT: "an instance serves a version close enough to its own",
    admission.WEIGHT_UPDATE: "the instances serve again",
}


#: A caller that is late by this much is said to be, seconds.
_LATE_S = 2.0


def stored_hold(now_ms: int, record: SessionRecord) -> pb.Hold | None:
    """The hold as the session's last try left it; None where it does not wait. A caller that is late is said to be."""
    row = record.fields
    if row.get("st") != "held":
        return None
    retry_ms, since_ms = int(row.get("retry") or 0), int(row.get("since") or 0)
    detail = row.get("detail", "")
    late_s = (now_ms - int(row.get("present") or now_ms)) / 1000.0
    if late_s > _LATE_S and row.get("homeless") != "1":
        detail = f"has not asked again for {late_s:.0f} s and may be gone; when it last did: {detail}"
    return hold_of(OnHold(row.get("reason", ""), retry_ms, record.position, record.ahead, since_ms, detail))


def current_hold(view: Pool, record: SessionRecord) -> pb.Hold | None:
    """The hold with reason and numbers of now, and what would end it; None where the session does not wait.

    No reason is given where nothing holds it any more but that its caller has not asked again.
    """
    hold = stored_hold(view.now_ms, record)
    if hold is None:
        return None
    row = record.fields
    ask = Ask.decode(
        record.session_id,
        row.get("class", ""),
        row.get("ask", ""),
        group_id=row.get("group", ""),
        policy_version=int(row["pv"]) if row.get("pv") else None,
    )
    if row.get("homeless") == "1":
        ask = ask.moved(int(row["ctx"]))
    declared = row.get("declared", "")
    stranger = bool(declared and view.config.classes) and view.config.named(declared) is None
    verdict = admission.decide(view, ask)
    if verdict.candidates:
        hold.reason = pb.HOLD_REASON_UNSPECIFIED
        hold.detail = (
            f"there is room on {view.instances[verdict.candidates[0].instance].label} now: enters at its next try"
        )
        return hold
    hold.reason = pb.HoldReason.Value(f"HOLD_REASON_{verdict.reason}")
    remedy = RELEASED_BY.get(verdict.reason, "it is changed: it can not enter as it is")
    hold.detail = f"{verdict.detail}; enters when {remedy}" if verdict.detail else f"enters when {remedy}"
    if stranger:
        hold.detail += f"; {unknown_class(declared)}"
    return hold
