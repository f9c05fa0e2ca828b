-- Reads what decisions rest on: the pool, its classes, instances, groups and the heads of its queues.
-- include: _base
--
-- ARGV  2 number of heads to read per class: the first ones that are there (waiting, or due to poll again). Before them
--       come sessions that lost their home, there or not: they are leased, and go first.
-- Returns {now, pool fields, class fields, policy, {{instance key, its fields, its groups} ...},
--          {{class, length, 1 if more are there, {{sid, its fields} ...}} ...}}
-- Members of a queue that are looked at (those who left without a word are gone after half a minute), and homeless ones
-- that are read.
local SCAN, HOMELESS = 1024, 64
local instances, queues = {}, {}
for _, ikey in ipairs(call('SMEMBERS', P .. 'instances')) do
  instances[#instances + 1] = { ikey, call('HGETALL', P .. 'i:' .. ikey), call('HGETALL', P .. 'g:' .. ikey) }
end
for _, class in ipairs(call('SMEMBERS', P .. 'queues')) do
  local heads, wanted, homeless, length = {}, tonumber(ARGV[2]), HOMELESS, call('ZCARD', P .. 'q:' .. class)
  for _, sid in ipairs(call('ZRANGE', P .. 'q:' .. class, 0, SCAN - 1)) do
    local key = P .. 's:' .. sid
    local found = call('HMGET', key, 'present', 'homeless')
    local lost, there = found[2] == '1', tonumber(found[1] or 0) > now
    if lost or there then
      local row = call('HMGET', key, 'ask', 'reason', 'since', 'present', 'homeless', 'group', 'pv', 'ctx')
      heads[#heads + 1] = { sid, row }
      if lost then homeless = homeless - 1 else wanted = wanted - 1 end
    end
    if wanted == 0 or homeless == 0 then break end
  end
  local more = wanted == 0 or homeless == 0 or length > SCAN
  queues[#queues + 1] = { class, length, more and 1 or 0, heads }
end
local policy = call('GET', P .. 'policy') or ''
return { text(now), call('HGETALL', POOL), call('HGETALL', CLASSES), policy, instances, queues }
