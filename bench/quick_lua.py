"""The in-process store without what it does to be safe with scripts that nobody checked: several times as fast.

fakeredis compiles a script anew each time it runs, collects all of Lua's garbage after it, looks at every call for
globals that the script may have made, and takes some forty microseconds to find its way to a dictionary. The scripts
here are few, always the same, and checked by luacheck; three in four of their calls read or write an existing hash.
Only for simulations: what serves runs on fakeredis as it is.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

from fakeredis.commands_mixins import scripting_mixin
from fakeredis.model import Hash

_SLOW = object()
"""Answer of a short cut that is none for the case at hand."""


def _hash(db: Any, key: bytes) -> Any:
    """The hash at a key, where it may be used as a plain dictionary."""
    item = db.get(key)
    # Fields that expire, and keys of other types, are left to fakeredis.
    if item is None or type(item.value) is not Hash or item.value._expirations:
        return None
    return item.value._values


def _hget(db: Any, key: bytes, field: bytes) -> Any:
    values = _hash(db, key)
    return _SLOW if values is None else values.get(field)


def _hmget(db: Any, key: bytes, *fields: bytes) -> Any:
    values = _hash(db, key)
    return _SLOW if values is None else [values.get(field) for field in fields]


def _hgetall(db: Any, key: bytes) -> Any:
    values = _hash(db, key)
    return _SLOW if values is None else dict(values)


def _exists(db: Any, *keys: bytes) -> Any:
    return sum(key in db for key in keys)


def _hset(db: Any, key: bytes, *pairs: bytes) -> Any:
    values = _hash(db, key)
    if values is None:
        return _SLOW
    before = len(values)
    values.update(zip(pairs[::2], pairs[1::2], strict=True))
    return len(values) - before


def _hincrby(db: Any, key: bytes, field: bytes, amount: bytes) -> Any:
    values = _hash(db, key)
    if values is None:
        return _SLOW
    number = int(values.get(field, b"0")) + int(amount)
    values[field] = b"%d" % number
    return number


_SHORT: Mapping[bytes, Callable[..., Any]] = {
    b"EXISTS": _exists,
    b"HGET": _hget,
    b"HGETALL": _hgetall,
    b"HINCRBY": _hincrby,
    b"HMGET": _hmget,
    b"HSET": _hset,
}

_call = scripting_mixin.ScriptingCommandsMixin._lua_redis_call


def _quick_call(self: Any, runtime: Any, expected_globals: set[Any], op: bytes, *args: Any) -> Any:
    """redis.call, by a short cut where there is one."""
    short = _SHORT.get(op)
    if short is not None:
        result = short(self._db, *map(scripting_mixin._convert_redis_arg, args))
        if result is not _SLOW:
            return self._convert_redis_result(runtime, result)
    return _call(self, runtime, expected_globals, op, *args)


def _quick_eval(self: Any, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
    """EVAL, with each script compiled once per server."""
    server = self._server
    runtime = self._get_server_runtime(server)
    compiled = server.__dict__.setdefault("_compiled_scripts", {})
    if script not in compiled:
        server.script_cache[hashlib.sha1(script).hexdigest().encode()] = script
        compiled[script] = runtime.compile(script)
    server._lua_current_socket[0] = self
    self._script_resp = 2
    server._lua_set_keys_argv(runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:]))
    try:
        result = compiled[script]()
    finally:
        self._script_resp = None
    return self._convert_lua_result(result, nested=False)


def _unchecked(*_: object) -> None:
    """Instead of looking for new globals."""


@contextlib.contextmanager
def quick_lua() -> Iterator[None]:
    """Scripts run so while the block lasts."""
    mixin = scripting_mixin.ScriptingCommandsMixin
    with (
        patch.object(mixin, "eval", _quick_eval),
        patch.object(mixin, "_lua_redis_call", _quick_call),
        patch.object(scripting_mixin, "_check_for_lua_globals", _unchecked),
    ):
        yield
