"""The in-process store without what it does to be safe with scripts that nobody checked: several times as fast.

fakeredis compiles a script anew each time it runs, collects all of Lua's garbage after it, and looks at every call for
globals that the script may have made. The scripts here are few, always the same, and checked by luacheck. Only for
simulations: what serves runs on fakeredis as it is.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from fakeredis.commands_mixins import scripting_mixin


def _eval(self: Any, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
    """EVAL, with each script compiled once per server."""
    server = self._server
    runtime = self._get_server_runtime(server)
    compiled = server.__dict__.setdefault("_compiled_scripts", {})
    if script not in compiled:
        server.script_cache[hashlib.sha1(script).hexdigest().encode()] = script
        compiled[script] = runtime.compile(script)
    server._lua_current_socket[0] = self
    self._script_resp = 2
    server._lua_set_keys_argv(
        runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:])
    )
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
    with (
        patch.object(scripting_mixin.ScriptingCommandsMixin, "eval", _eval),
        patch.object(scripting_mixin, "_check_for_lua_globals", _unchecked),
    ):
        yield
