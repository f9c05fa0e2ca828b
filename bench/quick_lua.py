"""The in-process store without what it does to be safe with scripts that nobody checked: several times as fast.

fakeredis compiles a script anew each time it runs, collects all of Lua's garbage after it, looks at every call for
globals that the script may have made, and takes some forty microseconds to find its way to a dictionary. The scripts
here are few, always the same, and checked by luacheck; three in four of their calls are for hashes, which are kept in
Lua here. Only for simulations: what serves runs on fakeredis as it is. Hashes are not seen by commands outside scripts.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fakeredis._helpers import current_time
from fakeredis.commands_mixins import scripting_mixin

HASHES = Path(__file__).with_name("quick_hashes.lua")

_PREPARE = b"""
function(source)
  local clock = { now = 0 }
  redis.call = loadstring(source)(redis.call, clock)
  return function(keys, argv, now)
    KEYS, ARGV, clock.now = keys, argv, now
  end
end
"""


def _prepared(server: Any, runtime: Any) -> Any:
    """The function that sets keys, arguments and time of the script that runs next."""
    if not hasattr(server, "_quick_begin"):
        server._quick_begin = runtime.eval(_PREPARE)(HASHES.read_bytes())
        server._quick_scripts = {}
    return server._quick_begin


def _quick_eval(self: Any, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
    """EVAL, with each script compiled once per server."""
    server = self._server
    runtime = self._get_server_runtime(server)
    begin = _prepared(server, runtime)
    if script not in server._quick_scripts:
        server.script_cache[hashlib.sha1(script).hexdigest().encode()] = script
        server._quick_scripts[script] = runtime.compile(script)
    server._lua_current_socket[0] = self
    self._script_resp = 2
    keys, arguments = runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:])
    begin(keys, arguments, current_time())
    try:
        result = server._quick_scripts[script]()
    finally:
        self._script_resp = None
    return self._convert_lua_result(result, nested=False)


def _unchecked(*_: object) -> None:
    """Instead of looking for new globals."""


@contextlib.contextmanager
def quick_lua() -> Iterator[None]:
    """Scripts run so while the block lasts."""
    with (
        patch.object(scripting_mixin.ScriptingCommandsMixin, "eval", _quick_eval),
        patch.object(scripting_mixin, "_check_for_lua_globals", _unchecked),
    ):
        yield
