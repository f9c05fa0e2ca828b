-- Shared head of every script. KEYS[1] is the pool's hash (it routes to the pool's slot), ARGV[1] the prefix of all the
-- pool's keys (they share one hash tag). Times are milliseconds on the store's clock; blocks and tokens are integers.
-- Field names are listed in ../keys.py.
local call = redis.call
local P = ARGV[1]
-- While a Cluster moves the pool's slot its keys are on two nodes, and a command on one that is not here fails, even on
-- one that is nowhere. So it fails at once: a script that stopped halfway would leave half a transition.
call('EXISTS', P .. 'nothing')
local POOL, CLASSES = P .. 'pool', P .. 'classes'
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function text(n)
  return string.format('%.0f', n)
end

-- The named fields of a hash as a table; a missing field is nil.
local function fields(key, ...)
  local names, row = { ... }, {}
  local values = call('HMGET', key, ...)
  for i, name in ipairs(names) do
    row[name] = values[i] or nil
  end
  return row
end

-- Marks a session as changed, for the controller's mirror.
local function touch(sid)
  call('ZADD', P .. 'changed', call('HINCRBY', POOL, 'rev', 1), sid)
end
