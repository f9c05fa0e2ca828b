-- Ends a session, or takes a held one out of the queue. Needs no capacity and is idempotent.
-- include: _base _events _replay _ledger _queue _lease _end
--
-- ARGV  2 request id  3 hash of the body  4 session  5 token ('' = none)  6 outcome  7 final context ('' = unknown)
--       8 how long a paused session is remembered  9 1 = evict: no token needed  10 reason for the history
-- Returns {'RELEASED', duration, block-time, peak} | {'OVER', duration, block-time, peak} (already over)
--       | {'NOTHING', 1 if the pool is known} (never known) | {'NOTOKEN'} | {'STALE'} | {'REUSED'}
local sid = ARGV[4]
local key = P .. 's:' .. sid

local before = replayed(ARGV[2], ARGV[3])
if before then return before end

local row = fields(key, 'st', 'class', 'inst', 'group', 'token', 'admitted', 'ctx', 'homeless', 'shr')
if not row.st or row.st == 'paused' then
  -- The caller that paused it may give its seniority up.
  if row.st and ARGV[6] ~= 'PAUSED' and (ARGV[5] == row.token or ARGV[9] == '1') then
    call('ZREM', P .. 'leases', sid)
    call('ZREM', P .. 'sessions', sid)
    call('DEL', key)
  end
  local done = fields(P .. 'done:' .. sid, 'duration', 'z', 'peak')
  if done.duration then return remember(ARGV[2], ARGV[3], { 'OVER', done.duration, done.z, done.peak }) end
  local nothing = { 'NOTHING', call('HEXISTS', POOL, 'named') }
  -- A pool that is not known may be about to register, so that is not final.
  return nothing[2] == 1 and remember(ARGV[2], ARGV[3], nothing) or nothing
end

local waiting = row.st == 'held' and row.homeless ~= '1'
if not waiting and ARGV[9] ~= '1' then
  if ARGV[5] == '' then return { 'NOTOKEN' } end
  if ARGV[5] ~= row.token then return remember(ARGV[2], ARGV[3], { 'STALE' }) end
end

-- First, as a full store refuses a script's first write unless it frees something, and an end is never refused.
call('ZREM', P .. 'leases', sid)
if ARGV[7] ~= '' then
  row.ctx = ARGV[7]
  call('HSET', key, 'ctx', ARGV[7])
end
if ARGV[7] ~= '' and row.st == 'live' then
  -- The last growth, known only now, belongs to the session's peak.
  local home = fields(P .. 'i:' .. row.inst, 'bs')
  set_blocks(sid, row.class, row.inst, own_blocks(tonumber(ARGV[7]), tonumber(home.bs), tonumber(row.shr or 0)))
end
-- A failure may be the first sign that an engine is gone: until anything is heard of it nobody new goes there.
if ARGV[6] == 'FAILED' and row.st == 'live' then call('HSET', P .. 'i:' .. row.inst, 'failed_at', text(now)) end
if ARGV[6] == 'COMPLETED' and row.st == 'live' then call('HDEL', P .. 'i:' .. row.inst, 'failed_at') end
local duration, z, peak = finish(sid, row, ARGV[6], ARGV[9] == '1' and 'evict' or 'release', ARGV[10])
if ARGV[6] == 'PAUSED' then remember_paused(sid, tonumber(ARGV[8])) end
return remember(ARGV[2], ARGV[3], { 'RELEASED', duration, z, peak })
