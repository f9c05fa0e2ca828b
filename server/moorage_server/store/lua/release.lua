-- Ends a session, or takes a held one out of the queue. Needs no capacity and is idempotent.
-- include: _base _events _replay _ledger _queue _lease _end
--
-- ARGV  2 request id  3 hash of the body  4 session  5 token ('' = none)  6 outcome  7 final context ('' = unknown)
--       8 how long a paused session is remembered  9 1 = evict: no token needed  10 reason for the history
--       11 1 = only if held and never admitted (a cancelled wait)
-- Returns {'RELEASED', duration, block-time, peak} | {'OVER', duration, block-time, peak} (already over)
--       | {'NOTHING', 1 if the pool is known} (never known) | {'NOTOKEN'} | {'STALE'} | {'REUSED'}
local sid = ARGV[4]
local key = P .. 's:' .. sid

local before = replayed(ARGV[2], ARGV[3])
if before then return before end

local row = fields(key, 'st', 'class', 'inst', 'group', 'rank', 'token', 'admitted', 'ctx', 'homeless', 'shr', 'phase')
if not row.st or row.st == 'paused' then
  if row.st and ARGV[6] ~= 'PAUSED' then
    call('ZREM', P .. 'leases', sid)
    call('ZREM', P .. 'sessions', sid)
    call('DEL', key)
  end
  local done = fields(P .. 'done:' .. sid, 'duration', 'z', 'peak')
  if not done.duration then return { 'NOTHING', call('HEXISTS', POOL, 'named') } end
  return { 'OVER', done.duration, done.z, done.peak }
end

local waiting = row.st == 'held' and row.homeless ~= '1'
if ARGV[11] == '1' and not waiting then return { 'NOTHING', 1 } end
if not waiting and ARGV[9] ~= '1' then
  if ARGV[5] == '' then return { 'NOTOKEN' } end
  if ARGV[5] ~= row.token then return { 'STALE' } end
end

local final = tonumber(ARGV[7])
if final and row.st == 'live' then
  -- The last growth, known only now, belongs to the session's peak.
  local home = fields(P .. 'i:' .. row.inst, 'bs')
  row.ctx = ARGV[7]
  set_blocks(sid, row.class, row.inst, own_blocks(final, tonumber(home.bs), tonumber(row.shr or 0)))
end
if ARGV[6] == 'PAUSED' and final then call('HSET', key, 'ctx', ARGV[7]) end
local duration, z, peak = finish(sid, row, ARGV[6], ARGV[9] == '1' and 'evict' or 'release', ARGV[10])
if ARGV[6] == 'PAUSED' then
  call('ZADD', P .. 'leases', text(now + tonumber(ARGV[8])), sid)
  call('PEXPIRE', key, text(tonumber(ARGV[8]) + BACKSTOP_MS))
end
return remember(ARGV[2], ARGV[3], { 'RELEASED', duration, z, peak })
