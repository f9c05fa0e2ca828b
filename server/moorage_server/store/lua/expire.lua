-- Ends what ran out: leases of sessions, places in the queue. Bounded per second, and not at all during a grace period.
-- include: _base _events _ledger _queue _lease _end _grace
--
-- ARGV  2 most sessions to end per second  3 most to end in this call
--       4 how long the lease of a session runs on while its home loads weights, is paused, or sleeps
-- Returns the number ended
if in_grace() then return 0 end
local budget = fields(POOL, 'exp_s', 'exp_n')
local second = text(math.floor(now / 1000))
local spent = budget.exp_s == second and tonumber(budget.exp_n) or 0
local room = math.min(tonumber(ARGV[2]) - spent, tonumber(ARGV[3]))
if room <= 0 then return 0 end

-- While weights are loaded nobody can do anything: a caller that stands still with its engine is not gone.
local function excused(row)
  if row.st ~= 'live' then return false end
  local home = fields(P .. 'i:' .. row.inst, 'upd', 'upd_at', 'state', 'state_at')
  local since = home.upd and home.upd_at or home.state_at
  local still = home.upd or STILL[home.state]
  return still and now - tonumber(since or 0) < tonumber(ARGV[4])
end

local ended = 0
for _, sid in ipairs(call('ZRANGEBYSCORE', P .. 'leases', '-inf', text(now), 'LIMIT', 0, room)) do
  local row = fields(P .. 's:' .. sid, 'st', 'class', 'inst', 'group', 'admitted', 'ctx', 'ttl')
  if row.st == 'paused' or not row.st then
    call('DEL', P .. 's:' .. sid)
    call('ZREM', P .. 'leases', sid)
    call('ZREM', P .. 'sessions', sid)
    ended = ended + 1
  elseif excused(row) then
    renew(sid, tonumber(row.ttl))
  else
    finish(sid, row, 'EXPIRED', 'expire', 'lease ran out')
    ended = ended + 1
  end
end
for _, sid in ipairs(call('ZRANGEBYSCORE', P .. 'held', '-inf', text(now), 'LIMIT', 0, room - ended)) do
  local row = fields(P .. 's:' .. sid, 'st', 'class', 'inst', 'group', 'admitted', 'ctx')
  call('ZREM', P .. 'held', sid)
  if row.st == 'held' then finish(sid, row, 'EXPIRED', 'expire', 'did not ask again') end
  ended = ended + 1
end
if ended > 0 then call('HSET', POOL, 'exp_s', second, 'exp_n', spent + ended) end
return ended
