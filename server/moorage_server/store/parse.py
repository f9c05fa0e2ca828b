"""Turns what ``view.lua`` read into the plain values that the policy works on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from moorage.v1 import scheduler_pb2 as pb
from moorage_server.core import labels
from moorage_server.core.config import ClassConfig, PoolConfig
from moorage_server.core.labels import Model
from moorage_server.core.view import UNINDEXED, Ask, Class, Held, Instance, Pool, PrefixIndex, Published, Queue
from moorage_server.store import keys

#: An index that was not updated for so long has expired.
_INDEX_KEPT_MS = 600_000


def text(value: Any) -> str:
    """A reply as text; bytes that are no UTF-8 never come from our own scripts."""
    return value.decode() if isinstance(value, bytes) else str(value)


def pairs(flat: Iterable[Any]) -> dict[str, Any]:
    """A flat list of names and values as a dict; values stay as they are."""
    items = iter(flat)
    return {text(name): value for name, value in zip(items, items, strict=True)}


def optional_int(value: Any) -> int | None:
    """An integer, or None for what is absent or empty."""
    return int(value) if value not in (None, b"", "") else None


def encode_config(config: PoolConfig) -> str:
    """A pool's configuration as JSON."""
    row = {name: getattr(config, name) for name in PoolConfig.__dataclass_fields__ if name != "classes"}
    row["classes"] = {
        name: {key: getattr(c, key) for key in ClassConfig.__dataclass_fields__} for name, c in config.classes.items()
    }
    return json.dumps(row)


@lru_cache(maxsize=64)
def decode_config(data: bytes) -> PoolConfig:
    """The reverse of :func:`encode_config`; what a newer server wrote and this one does not know is left out."""
    row = {k: v for k, v in json.loads(data).items() if k in PoolConfig.__dataclass_fields__}
    classes = {}
    for name, c in row.pop("classes").items():
        known = {k: v for k, v in c.items() if k in ClassConfig.__dataclass_fields__}
        classes[name] = ClassConfig(**{**known, "aliases": tuple(c.get("aliases", ()))})
    return PoolConfig(**row, classes=MappingProxyType(classes))


def encode_published(
    published: Mapping[str, Published], decisions_per_second: float, profiles: Model | None = None
) -> str:
    """What the controller found of the whole pool, as JSON; the ``profiles`` of classes where they are to be used."""
    rows = {n: {f: getattr(p, f) for f in Published.__dataclass_fields__} for n, p in published.items()}
    told = {"classes": rows, "decisions_per_second": decisions_per_second}
    return json.dumps(told if profiles is None else {**told, "labels": labels.encode_model(profiles)})


@lru_cache(maxsize=64)
def decode_published(data: bytes) -> tuple[dict[str, Published], float, Model | None]:
    """The reverse of :func:`encode_published`. The result is shared: do not change it."""
    if not data:
        return {}, 0.0, None
    row = json.loads(data)
    classes = {n: Published(**{**p, "survival": tuple(p["survival"])}) for n, p in row["classes"].items()}
    profiles = labels.decode_model(row["labels"]) if "labels" in row else None
    return classes, float(row["decisions_per_second"]), profiles


@lru_cache(maxsize=4096)
def _snapshot(raw: bytes) -> pb.InstanceSnapshot:
    return pb.InstanceSnapshot.FromString(raw)


@lru_cache(maxsize=4096)
def _caps(data: bytes) -> MappingProxyType[str, int]:
    return MappingProxyType(json.loads(data) if data else {})


def prefix_index(row: Mapping[str, Any], now_ms: int) -> PrefixIndex:
    """What is known of an instance's prefix cache, from the instance's hash."""
    updated_ms = optional_int(row.get("px_at"))
    # The same rule as in _prefix.lua.
    if updated_ms is None or now_ms - updated_ms >= _INDEX_KEPT_MS:
        return PrefixIndex()
    return PrefixIndex(
        text(row.get("px_src", UNINDEXED)), int(row.get("px_n", 0)), updated_ms, behind=row.get("px_behind") == b"1"
    )


def instance(key: str, row: dict[str, Any], groups: dict[str, Any], now_ms: int) -> Instance:
    """One instance, from its hash and the hash of its shared prefixes."""
    name, rank = keys.split_instance(key)
    snap = _snapshot(row.get("snap", b""))

    def known(field: str) -> Any:
        return getattr(snap, field) if snap.HasField(field) else None  # type: ignore[arg-type]

    prefill = known("prefill_tokens_per_second")
    return Instance(
        key=key,
        instance_id=name,
        dp_rank=rank,
        incarnation=text(row["inc"]),
        endpoint=snap.endpoint,
        state=text(row.get("state", b"")),
        seen_ms=int(row.get("seen", 0)),
        observed_age_ms=int(row.get("age", 0)),
        cordoned=row.get("cordon") == b"1",
        drain_asked=row.get("drain") == b"1",
        gone=row.get("gone") == b"1",
        block_size=int(row["bs"]),
        total_blocks=known("total_blocks"),
        used_blocks=known("used_blocks"),
        waiting_capacity=known("waiting_capacity"),
        prefix_query_tokens=known("prefix_query_tokens_total"),
        prefix_hit_tokens=known("prefix_hit_tokens_total"),
        prefill_tokens=known("prefill_tokens_total"),
        generation_tokens=known("generation_tokens_total"),
        preemptions=known("preemptions_total"),
        prefill_rate=prefill if prefill and prefill > 0 else None,
        max_context=known("max_context_tokens"),
        weight_version=text(row.get("wv", b"")),
        policy_version=optional_int(row.get("pv")),
        updating_since_ms=optional_int(row.get("upd_at")),
        update_holds=row.get("upd") == b"hold",
        epoch=int(row.get("ep", 0)),
        failed_at_ms=optional_int(row.get("failed_at")),
        stalled=row.get("stalled") == b"1",
        running=known("running"),
        sessions=int(row.get("ses", 0)),
        by_class={k[2:]: int(v) for k, v in row.items() if k.startswith("c:") and v != b"0"},
        reserved_blocks=int(row.get("blocks", 0)),
        shared_blocks=int(row.get("shared", 0)),
        groups={k[2:]: int(v) for k, v in groups.items() if k.startswith("b:")},
        group_classes={k[2:]: text(v) for k, v in groups.items() if k.startswith("k:")},
        backlog_blocks=int(row.get("backlog", 0)),
        hits={k[5:]: (int(v), int(row.get("hgot:" + k[5:], 0))) for k, v in row.items() if k.startswith("hexp:")},
        hits_at_ms=optional_int(row.get("hat")),
        prefixes=prefix_index(row, now_ms),
        need=tuple(int(n) for n in row["need"].split(b",")) if row.get("need") else (),
        added=text(row.get("added", b"")),
        budget=optional_int(row.get("budget")),
        cap=optional_int(row.get("cap")),
        class_caps=_caps(row.get("caps", b"")),
        brake=float(row.get("brake", 1.0)),
        pressure=float(row.get("pressure", 0.0)),
        signals=text(row.get("signals", b"")),
        snapshot=row.get("snap", b""),
    )


_CLASS_FIELDS = {
    "act": "active",
    "held": "held",
    "rel": "released",
    "done": "completed",
    "adm": "admitted",
    "blk": "blocks",
    "z": "block_ms",
    "d": "session_ms",
    "at": "accrued_ms",
    "vt": "virtual_time",
    "gap": "gap_ms",
    "gapn": "gaps",
    "hexp": "expected_hit_tokens",
    "hgot": "found_hit_tokens",
    "rl": "relabelled",
}


def classes(row: dict[str, Any]) -> dict[str, Class]:
    """All classes, from the one hash that holds their counters."""
    table: dict[str, Class] = {}
    for field, value in row.items():
        short, _, name = field.partition(":")
        setattr(table.setdefault(name, Class()), _CLASS_FIELDS[short], int(value))
    return table


def held(session_id: str, name: str, row: list[Any]) -> Held:
    """A held session, from the fields that ``view.lua`` reads of it."""
    ask, reason, since, present, homeless, group, version, context = row
    policy_version = optional_int(version)
    asked = Ask.decode(session_id, name, text(ask or b""), group_id=text(group or b""), policy_version=policy_version)
    if homeless == b"1":
        asked = asked.moved(int(context))
    return Held(asked, text(reason or b""), int(since or 0), int(present or 0))


def pool(name: str, reply: list[Any], default: PoolConfig) -> Pool:
    """The whole view."""
    now, row, class_row, policy, instance_rows, queue_rows = reply
    fields = pairs(row)
    config = decode_config(fields["config"]) if fields.get("config") else default
    published, rate, profiles = decode_published(policy)
    # The same rule as in _grace.lua.
    silence_ms = int(now) - int(fields.get("alive", now))
    result = Pool(
        name,
        int(now),
        config,
        classes=classes(pairs(class_row)),
        published=published,
        global_virtual_time=int(fields.get("gvt", 0)),
        unlabelled=int(fields.get("unlabelled", 0)),
        unknown_class=int(fields.get("unknown", 0)),
        inferred=int(fields.get("inferred", 0)),
        mislabelled=int(fields.get("mislabelled", 0)),
        labels=profiles,
        decisions=int(fields.get("decisions", 0)),
        epochs=int(fields.get("epochs", 0)),
        revision=int(fields.get("rev", 0)),
        named=fields.get("named") == b"1",
        updating_since_ms=optional_int(fields.get("upd_at")),
        config_version=int(fields.get("cfgv", 0)),
        in_grace=int(fields.get("grace", 0)) > int(now) or silence_ms > int(fields.get("quiet", 0)),
        decisions_per_second=rate,
    )
    for raw_key, instance_row, group_row in instance_rows:
        key, values = text(raw_key), pairs(instance_row)
        if values:
            result.instances[key] = instance(key, values, pairs(group_row), int(now))
    for raw_name, length, more, heads in queue_rows:
        name_ = text(raw_name)
        members = [held(text(sid), name_, fields_) for sid, fields_ in heads]
        result.queues[name_] = Queue(int(length), members, bool(more))
    return result
