-- Keeps the places of callers that wait inside an open call, and the leases of those whose home is lost.
-- include: _base _lease
--
-- ARGV  2 present for  3 place kept for  4 number of sessions, then their ids
-- Returns the state of each: 'held', or 'live' or '' where its wait is over
local states = {}
for i = 5, 4 + tonumber(ARGV[4]) do
  local sid = ARGV[i]
  local row = fields(P .. 's:' .. sid, 'st', 'homeless', 'ttl')
  if row.st == 'held' then
    local present = text(now + tonumber(ARGV[2]))
    call('HSET', P .. 's:' .. sid, 'present', present, 'waits', present)
    if row.homeless == '1' then
      renew(sid, tonumber(row.ttl))
    else
      call('ZADD', P .. 'held', text(now + tonumber(ARGV[3])), sid)
    end
  end
  states[#states + 1] = row.st or ''
end
return states
