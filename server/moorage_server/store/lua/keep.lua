-- Keeps the places of callers that wait inside an open call.
-- include: _base
--
-- ARGV  2 present for  3 place kept for  4 number of sessions, then their ids
-- Returns the number still held
local kept = 0
for i = 5, 4 + tonumber(ARGV[4]) do
  local key = P .. 's:' .. ARGV[i]
  local row = fields(key, 'st', 'homeless')
  if row.st == 'held' then
    call('HSET', key, 'present', text(now + tonumber(ARGV[2])))
    if row.homeless ~= '1' then call('ZADD', P .. 'held', text(now + tonumber(ARGV[3])), ARGV[i]) end
    kept = kept + 1
  end
end
return kept
