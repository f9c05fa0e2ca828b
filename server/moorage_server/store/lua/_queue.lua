-- The queue: one sorted set per class, by rank of first arrival. Rank, not time, decides, so a retry cannot overtake.

-- Rank of first arrival. The samples of one prompt share the rank of the first of them, so that they stay together.
local function rank_of_arrival(group)
  if group == '' then return call('HINCRBY', POOL, 'rank', 1) end
  local memo = P .. 'gr:' .. group
  local rank = call('GET', memo) or call('HINCRBY', POOL, 'rank', 1)
  call('SET', memo, rank, 'PX', 600000)
  return rank
end

local function enqueue(sid, class, rank)
  call('ZADD', P .. 'q:' .. class, rank, sid)
  call('SADD', P .. 'queues', class)
  call('HINCRBY', CLASSES, 'held:' .. class, 1)
end

local function dequeue(sid, class)
  if call('ZREM', P .. 'q:' .. class, sid) == 1 then
    call('HINCRBY', CLASSES, 'held:' .. class, -1)
    if call('ZCARD', P .. 'q:' .. class) == 0 then call('SREM', P .. 'queues', class) end
  end
  call('ZREM', P .. 'held', sid)
end

-- Whether nobody who is there (waiting, or due to poll again) goes before `sid` in its class. Bounded like view.lua.
local function first_in_line(sid, class)
  for _, other in ipairs(call('ZRANGE', P .. 'q:' .. class, 0, 1023)) do
    if other == sid then return true end
    if tonumber(call('HGET', P .. 's:' .. other, 'present') or 0) > now then return false end
  end
  return true
end

-- Position in the class's queue (from 1) and number of held sessions of all classes with a lower rank.
local function standing(sid, class)
  local key = P .. 'q:' .. class
  local position = call('ZRANK', key, sid)
  if not position then return 0, 0 end
  local rank, ahead = call('ZSCORE', key, sid), 0
  for _, name in ipairs(call('SMEMBERS', P .. 'queues')) do
    ahead = ahead + call('ZCOUNT', P .. 'q:' .. name, '-inf', '(' .. rank)
  end
  return position + 1, ahead
end
