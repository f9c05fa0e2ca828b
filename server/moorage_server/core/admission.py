"""May this session enter, and where? The whole policy, for the sessions at the heads of the queues.

``plan`` walks the queue in order and says, for each session that may enter now, which instances may take it. It works
on a view that may be slightly old: the ledger checks the guards of each candidate again when it commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from moorage_server.core import config as cfg
from moorage_server.core import estimates, forecast, placement, queue
from moorage_server.core.view import (
    DRAINING,
    FRESH,
    PAUSED,
    SERVING,
    SLEEPING,
    STALE,
    Ask,
    Class,
    Held,
    Instance,
    Pool,
    Queue,
)

POOL_CAP = "POOL_CAP"
CLASS_CAP = "CLASS_CAP"
KV_BUDGET = "KV_BUDGET"
NO_INSTANCE = "NO_INSTANCE"
STALE_SNAPSHOT = "STALE_SNAPSHOT"
IS_DRAINING = "DRAINING"
QUEUED_BEHIND = "QUEUED_BEHIND"
STALENESS_LIMIT = "STALENESS_LIMIT"
WEIGHT_UPDATE = "WEIGHT_UPDATE"
TOO_LARGE = "TOO_LARGE"
CLASS_REFUSED = "CLASS_REFUSED"

#: Candidates handed to the ledger at most.
_CANDIDATES = 2
#: No limit, in a guard.
UNLIMITED = 2**52

#: What a newcomer asks for, by block size, shared blocks and largest context of the instance.
_Asks = Callable[[int, int, int | None], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that may take the session, with the guards that must still hold when it is committed."""

    instance: str
    incarnation: str
    cap: int
    #: Blocks of prefix shared with the group.
    shared: int
    #: Blocks that the first prefill computes.
    prefill: int
    expected_cached: int
    asks: tuple[int, ...] = ()
    limits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """PLACE (candidates), HOLD (none) or REJECT, with the reason and the numbers behind it."""

    ask: Ask
    reason: str
    detail: str
    candidates: tuple[Candidate, ...] = ()
    rejected: bool = False


def closed(pool: Pool) -> tuple[str, str] | None:
    """Why no instance takes new sessions at all, or None if some does."""
    alive = pool.alive()
    if not alive:
        return NO_INSTANCE, "no instance of the pool is alive"
    if any(i.open for i in alive):
        return None
    # Those that will serve again by themselves are what it waits for.
    if any(not (i.cordoned or i.draining) and (i.state in (PAUSED, SLEEPING) or i.update_holds) for i in alive):
        loading = sum(i.updating for i in alive)
        asleep = sum(i.state in (PAUSED, SLEEPING) for i in alive)
        return WEIGHT_UPDATE, f"of {len(alive)} instances {loading} load weights, {asleep} are paused or asleep"
    serving = [i for i in alive if i.state == SERVING]
    if not serving:
        return IS_DRAINING, "no instance serves: " + ", ".join(sorted({i.state for i in alive}))
    return IS_DRAINING, f"all {len(serving)} serving instances are cordoned or draining"


def refusal(pool: Pool, ask: Ask) -> tuple[str, str] | None:
    """Why the session can never enter, or None. A living session that lost its home is only ever too large."""
    configured = pool.config.classes.get(ask.workload_class)
    if configured is not None and configured.refused and not ask.homeless:
        return CLASS_REFUSED, f"class {ask.workload_class!r} is refused by configuration"
    if (stale := _too_stale(pool, ask)) is not None:
        return stale
    # One that is gone for now may be the one that is large enough: it counts until it is forgotten.
    if ask.prompt_tokens is None or not pool.alive():
        return None
    largest = max(_most_tokens(i) for i in pool.instances.values())
    if ask.prompt_tokens > largest:
        return TOO_LARGE, f"a prompt of {ask.prompt_tokens} tokens; the largest instance takes {largest}"
    return None


def outdated(pool: Pool, ask: Ask) -> Verdict | None:
    """REJECT for a session that became too stale to be useful while it waited; None where it did not."""
    stale = _too_stale(pool, ask)
    return None if stale is None else Verdict(ask, *stale, rejected=True)


def _too_stale(pool: Pool, ask: Ask) -> tuple[str, str] | None:
    """Why a sample of the session could not be trained on any more.

    Asked again at every try, so that versions that pass while it waits count as well.
    """
    lag = pool.config.max_policy_lag
    if lag is None or ask.policy_version is None or ask.homeless:
        return None
    newest = pool.policy_version
    if newest is None or newest - ask.policy_version <= lag:
        return None
    behind = newest - ask.policy_version
    detail = f"policy version {ask.policy_version} is {behind} behind {newest}, at most {lag} are allowed"
    return STALENESS_LIMIT, detail


def _most_tokens(instance: Instance) -> int:
    """Longest context that the engine can serve, as far as it said."""
    blocks = instance.total_blocks * instance.block_size if instance.total_blocks else UNLIMITED
    return min(blocks, instance.max_context or UNLIMITED)


def _consider(
    pool: Pool, ask: Ask, instance: Instance, booked: int, asks_of: _Asks
) -> tuple[Candidate | None, str, str]:
    """The candidate that ``instance`` makes for ``ask``, or why it does not fit: reason and detail."""
    config = pool.config
    reused = placement.reusable_prefix(ask, instance, config.shared_prefix(ask.workload_class))
    group_blocks = (ask.prompt_tokens or 0) // instance.block_size if ask.group_id else 0
    shared = min(group_blocks, instance.groups.get(ask.group_id, 0))
    # What is cached saves computing, and no booking: blocks that are others' may be evicted.
    prefill = max(0, -(-(booked - reused) // instance.block_size))
    cap = _cap_in_force(pool, instance)
    bare = Candidate(instance.key, instance.incarnation, cap, group_blocks, prefill, reused)
    if ask.prompt_tokens is not None and ask.prompt_tokens > _most_tokens(instance):
        return None, KV_BUDGET, f"{ask.prompt_tokens} tokens > {_most_tokens(instance)} that {instance.label} can serve"
    if pool.suspects(instance):
        return None, STALE_SNAPSHOT, f"a session failed on {instance.label} since it was last heard of"
    if instance.sessions >= cap:
        return None, POOL_CAP, f"{instance.sessions} of {cap} sessions on {instance.label}"
    if config.policy == cfg.STATIC:
        return bare, "", ""
    if config.reference_caps:
        over = _over_quota(pool, ask, instance)
        return (None, CLASS_CAP, over) if over else (bare, "", "")
    capacity = instance.capacity(config)
    if capacity is None:
        return None, STALE_SNAPSHOT, f"{instance.label} has not reported its blocks"
    asks = asks_of(instance.block_size, shared, instance.max_context)
    limits = guards(pool, instance, capacity, asks)
    need = instance.need or (0,) * forecast.WIDTH
    for n, a, limit in zip(need, asks, limits, strict=True):
        if n + a > limit:
            detail = f"{n} blocks needed + {a} asked > {limit} on {instance.label}"
            if pool.freshness(instance) == FRESH:
                return None, KV_BUDGET, detail
            why = "stands still" if instance.stalled else f"is known as it was {pool.age_s(instance):.1f} s ago"
            return None, STALE_SNAPSHOT, f"{instance.label} {why}; {detail}"
    return replace(bare, asks=asks, limits=limits), "", ""


def _over_quota(pool: Pool, ask: Ask, instance: Instance) -> str:
    """Why K_wb keeps the session out, or nothing. What a class without backlog does not use is lent to the others."""

    def full(name: str) -> bool:
        return instance.by_class.get(name, 0) >= instance.class_caps.get(name, UNLIMITED)

    name = ask.workload_class
    called_back = [other for other, q in pool.queues.items() if other != name and q.heads and not full(other)]
    if ask.homeless or not full(name) or not called_back:
        return ""
    used, cap = instance.by_class.get(name, 0), instance.class_caps[name]
    return f"{used} sessions of a quota of {cap} on {instance.label}, while class {called_back[0]!r} waits for its own"


def _cap_in_force(pool: Pool, instance: Instance) -> int:
    """K_w; before the controller's first epoch only `static` has one, the others go by the KV budget alone."""
    if instance.cap is not None:
        return instance.cap
    most = pool.config.max_sessions_per_instance or UNLIMITED
    return min(pool.config.static_cap, most) if pool.config.policy == cfg.STATIC else most


def guards(pool: Pool, instance: Instance, capacity: int, asks: tuple[int, ...]) -> tuple[int, ...]:
    """Limits on the need at each horizon. A stale instance takes only what fits even if nobody ends."""
    budget = capacity if instance.budget is None else instance.budget
    if pool.freshness(instance) == STALE:
        return (budget,) * (forecast.WIDTH - 1) + (capacity,)
    if instance.sessions == 0:
        # Alone on an instance, whatever can be served at all may enter: neither the forecast nor blocks in use that no
        # booking explains may lock it out.
        need = instance.need or (0,) * forecast.WIDTH
        budget = max(budget, *(n + a for n, a in zip(need, asks, strict=True)))
    return (budget,) * (forecast.WIDTH - 1) + (UNLIMITED,)


def try_place(pool: Pool, ask: Ask) -> Verdict:
    """Candidates for one session, best first, its turn in the queue taken for granted."""
    shut = closed(pool)
    if shut is not None:
        return Verdict(ask, *shut)
    alive = pool.alive()
    usable = [i for i in alive if i.open]
    growth = estimates.growth_of(pool, ask.workload_class)
    booked = forecast.tokens_to_book(ask, growth)
    asks_of = cache(partial(forecast.newcomer, ask, growth))
    found: list[Candidate] = []
    reason, detail = KV_BUDGET, ""
    for instance in placement.ranked(ask, usable, pool.config.shared_prefix(ask.workload_class)):
        candidate, why, numbers = _consider(pool, ask, instance, booked, asks_of)
        if candidate is not None:
            found.append(candidate)
            if len(found) == _CANDIDATES:
                break
        elif not detail:
            reason, detail = why, numbers
    if found:
        return Verdict(ask, "", "", tuple(found))
    shut_out = [i.label for i in alive if not i.open]
    others = f"; {len(shut_out)} more take nobody now, such as {shut_out[0]}" if shut_out else ""
    return Verdict(ask, reason, detail + others)


def observe(pool: Pool, ask: Ask) -> Verdict:
    """OBSERVE: by placement cost alone, with the reason that ENFORCE would have held it for."""
    alive = pool.alive()
    usable = [i for i in alive if i.open] or [i for i in alive if i.state in (SERVING, DRAINING)] or alive
    would = decide(pool, ask)
    class_prefix = pool.config.shared_prefix(ask.workload_class)
    found = []
    for i in placement.ranked(ask, usable, class_prefix)[:_CANDIDATES]:
        shared = (ask.prompt_tokens or 0) // i.block_size if ask.group_id else 0
        booked = forecast.tokens_to_book(ask, estimates.growth_of(pool, ask.workload_class))
        reused = placement.reusable_prefix(ask, i, class_prefix)
        prefill = max(0, booked - reused) // i.block_size
        found.append(Candidate(i.key, i.incarnation, UNLIMITED, shared, prefill, reused))
    return replace(would, candidates=tuple(found), rejected=False)


def charge(pool: Pool, verdict: Verdict, candidate: Candidate) -> None:
    """Books an admission on the view, so that the next decision made from it sees it."""
    first, ask = candidate, verdict.ask
    instance = pool.instances[first.instance]
    instance.sessions += 1
    instance.by_class[ask.workload_class] = instance.by_class.get(ask.workload_class, 0) + 1
    instance.backlog_blocks += first.prefill
    if first.asks:
        need = instance.need or (0,) * forecast.WIDTH
        instance.need = tuple(n + a for n, a in zip(need, first.asks, strict=True))
    if ask.group_id:
        instance.groups.setdefault(ask.group_id, first.shared)
    c = pool.classes.get(ask.workload_class)
    if c is not None:
        c.active += 1
    if c is not None and not ask.homeless:
        start = queue.start(pool, ask.workload_class)
        c.virtual_time = start + queue.step(pool, ask.workload_class)
        pool.global_virtual_time = max(pool.global_virtual_time, start)


def plan(pool: Pool, *, most: int = 256) -> Iterator[Verdict]:
    """Verdicts for the heads of the queues, in order, each as if those before it had been carried out.

    Ends when nobody fits any more, or nobody may pass. Who can never enter is rejected and holds nobody up. ``pool``
    itself is left as it is.
    """
    pool = pool.copy()
    queues = pool.queues
    blocked: list[str] = []
    for _ in range(most):
        waiting = [name for name in queue.order(pool, queues) if name not in blocked]
        if not waiting:
            return
        name = waiting[0]
        head = queues[name].heads[0]
        if not head.ask.homeless and any(queue.passed_enough(pool, other) for other in blocked):
            return
        never = refusal(pool, head.ask)
        verdict = _never(head.ask, *never) if never is not None else try_place(pool, head.ask)
        yield verdict
        if verdict.candidates or never is not None:
            queues[name].heads.pop(0)
            if verdict.candidates:
                charge(pool, verdict, verdict.candidates[0])
            if not queues[name].heads and queues[name].more:
                return
        elif verdict.reason in (NO_INSTANCE, WEIGHT_UPDATE, IS_DRAINING):
            return
        else:
            blocked.append(name)


def _never(ask: Ask, reason: str, detail: str) -> Verdict:
    """REJECT, except for a living session: that one is held until an instance comes that is large enough."""
    return Verdict(ask, KV_BUDGET, detail) if ask.homeless else Verdict(ask, reason, detail, rejected=True)


def decide(pool: Pool, ask: Ask) -> Verdict:
    """The verdict for one session that asks now, behind all that wait already."""
    never = refusal(pool, ask)
    if never is not None:
        return _never(ask, *never)
    shut = closed(pool)
    if shut is not None:
        return Verdict(ask, *shut)
    if not any(q.heads for q in pool.queues.values()):
        return try_place(pool, ask)
    return _decide_in_queue(pool.copy(), ask)


def _decide_in_queue(pool: Pool, ask: Ask) -> Verdict:
    """:func:`decide` where others wait; adds the session to the queues of ``pool``."""
    own = pool.queues.setdefault(ask.workload_class, Queue(0, []))
    place = next((n for n, h in enumerate(own.heads) if h.ask.session_id == ask.session_id), None)
    here = Held(ask, "", pool.now_ms, UNLIMITED)
    if place is not None:
        ask = replace(ask, homeless=ask.homeless or own.heads[place].ask.homeless)
        own.heads[place] = replace(own.heads[place], ask=ask, present_ms=UNLIMITED)
    elif ask.homeless:
        own.heads.insert(0, here)
    elif own.more:
        return Verdict(ask, QUEUED_BEHIND, f"{own.length} sessions of class {ask.workload_class!r} wait")
    else:
        own.heads.append(here)
    pool.classes.setdefault(ask.workload_class, Class())
    first: Verdict | None = None
    for verdict in plan(pool):
        if verdict.ask.session_id == ask.session_id:
            return verdict if verdict.candidates else explained(pool, verdict)
        if not verdict.candidates and first is None:
            first = verdict
    waits_for = (
        f"class {first.ask.workload_class!r} goes first and does not fit: {first.detail}" if first else "its turn"
    )
    return Verdict(ask, QUEUED_BEHIND, waits_for)


def explained(pool: Pool, verdict: Verdict) -> Verdict:
    """CLASS_CAP instead of KV_BUDGET where the class is past its quota: that is what must change first."""
    name = verdict.ask.workload_class
    caps = [i for i in pool.alive() if name in i.class_caps]
    if verdict.reason == KV_BUDGET and caps and all(i.by_class.get(name, 0) >= i.class_caps[name] for i in caps):
        used, quota = sum(i.by_class.get(name, 0) for i in caps), sum(i.class_caps[name] for i in caps)
        others = any(q.heads for other, q in pool.queues.items() if other != name)
        if others:
            detail = f"{used} sessions of a quota of {quota}, while other classes wait; {verdict.detail}"
            return replace(verdict, reason=CLASS_CAP, detail=detail)
    return verdict
