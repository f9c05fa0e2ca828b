-- Reads what decisions rest on: the pool, its classes, instances, groups and the heads of its queues.
-- include: _base
--
-- ARGV  2 number of heads to read per class: the first ones that are there (waiting, or due to poll again)
-- Returns {now, pool fields, class fields, policy, {{instance key, its fields, its groups} ...},
--          {{class, length, 1 if more are there, {{sid, its fields} ...}} ...}}
-- Members of a queue that are looked at: those who left without a word are gone after half a minute.
local SCAN = 64
local instances, queues = {}, {}
for _, ikey in ipairs(call('SMEMBERS', P .. 'instances')) do
  instances[#instances + 1] = { ikey, call('HGETALL', P .. 'i:' .. ikey), call('HGETALL', P .. 'g:' .. ikey) }
end
for _, class in ipairs(call('SMEMBERS', P .. 'queues')) do
  local heads, wanted, length = {}, tonumber(ARGV[2]), call('ZCARD', P .. 'q:' .. class)
  for _, sid in ipairs(call('ZRANGE', P .. 'q:' .. class, 0, SCAN - 1)) do
    local row = call('HMGET', P .. 's:' .. sid, 'ask', 'reason', 'since', 'present', 'homeless', 'group', 'pv')
    if tonumber(row[4] or 0) > now then heads[#heads + 1] = { sid, row } end
    if #heads == wanted then break end
  end
  queues[#queues + 1] = { class, length, (#heads == wanted or length > SCAN) and 1 or 0, heads }
end
return { text(now), call('HGETALL', POOL), call('HGETALL', CLASSES), call('GET', P .. 'policy') or '', instances, queues }
