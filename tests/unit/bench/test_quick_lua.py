"""Hashes kept in Lua answer as fakeredis does."""

import asyncio

import fakeredis
import pytest

from bench import virtual_time
from bench.quick_lua import quick_lua
from bench.simulate import virtual_store_clock

SCRIPT = """
local out = {}
local function add(...) out[#out + 1] = redis.call(...) or 'nothing' end
add('HGET', KEYS[1], 'a')
add('HSET', KEYS[1], 'a', 1, 'b', '0.25', 'c', 0.1)
add('HSET', KEYS[1], 'a', '2', 'd', 'x')
add('HINCRBY', KEYS[1], 'a', 40)
add('HINCRBY', KEYS[1], 'e', '-1')
add('HMGET', KEYS[1], 'a', 'nobody', 'c')
add('HDEL', KEYS[1], 'b', 'nobody')
add('HGETALL', KEYS[1])
add('HEXISTS', KEYS[1], 'a')
add('HEXISTS', KEYS[1], 'b')
add('EXISTS', KEYS[1])
add('SADD', KEYS[2], 'm')
add('EXISTS', KEYS[2])
add('PEXPIRE', KEYS[1], 1500)
add('PEXPIRE', KEYS[2], 1500)
add('HSET', KEYS[3], 'only', 1)
add('HDEL', KEYS[3], 'only')
add('EXISTS', KEYS[3])
add('DEL', KEYS[3])
add('TIME')
return out
"""
AFTER = """
return {
  redis.call('HGET', KEYS[1], 'a'), redis.call('EXISTS', KEYS[1], KEYS[2]), redis.call(ARGV[1], KEYS[1], KEYS[2])
}
"""


async def answers() -> list[object]:
    client = fakeredis.FakeAsyncRedis()
    found = [await client.eval(SCRIPT, 3, "h", "s", "empty")]
    # Before both keys expire, and after.
    for pause, command in ((1.4, "EXISTS"), (0.2, "DEL")):
        await asyncio.sleep(pause)
        found.append(await client.eval(AFTER, 2, "h", "s", command))
    found.append(await client.eval(SCRIPT, 3, "h", "s", "empty"))
    found.append(await client.eval(AFTER, 2, "h", "s", "DEL"))
    return found


def test_every_command_answers_the_same() -> None:
    with virtual_store_clock():
        plain = virtual_time.run(answers())
        with quick_lua():
            quick = virtual_time.run(answers())
    assert quick == plain
    assert b"42" in str(plain[0]).encode()


def test_errors_of_a_script_reach_the_caller() -> None:
    async def main() -> None:
        client = fakeredis.FakeAsyncRedis()
        with pytest.raises(Exception, match="nonsense"):
            await client.eval("error('nonsense')", 0)

    with virtual_store_clock(), quick_lua():
        virtual_time.run(main())
