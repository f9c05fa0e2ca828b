-- Ends sessions, or takes held ones out of the queue. Needs no capacity and is idempotent.
-- include: _base _events _replay _ledger _queue _lease _end
--
-- ARGV  2 how long a paused session is remembered  3 1 = evict: no token needed  4 its reason, for the history
--       5 number of items, then for each: request id, hash of the body, session, token ('' = none),
--       outcome, final context ('' = unknown)
-- Returns for each item, in order:
--         {'RELEASED', duration, block-time, peak} | {'OVER', duration, block-time, peak} (already over)
--       | {'NOTHING', 1 if the pool is known} (never known) | {'NOTOKEN'} | {'STALE'} | {'REUSED'}
local evict = ARGV[3] == '1'

-- First, as a full store refuses a script's first write unless it frees something, and an end is never refused.
call('ZREM', P .. 'leases', '')

local function release(rid, body, sid, token, outcome, context)
  local key = P .. 's:' .. sid

  local before = replayed(rid, body)
  if before then return before end

  local row = fields(key, 'st', 'class', 'inst', 'group', 'token', 'admitted', 'ctx', 'homeless', 'shr')
  if not row.st or row.st == 'paused' then
    -- The caller that paused it may give its seniority up.
    if row.st and outcome ~= 'PAUSED' and (token == row.token or evict) then
      call('ZREM', P .. 'leases', sid)
      call('ZREM', P .. 'sessions', sid)
      call('DEL', key)
    end
    local done = fields(P .. 'done:' .. sid, 'duration', 'z', 'peak')
    if done.duration then return remember(rid, body, { 'OVER', done.duration, done.z, done.peak }) end
    local nothing = { 'NOTHING', call('HEXISTS', POOL, 'named') }
    -- A pool that is not known may be about to register, so that is not final.
    return nothing[2] == 1 and remember(rid, body, nothing) or nothing
  end

  local waiting = row.st == 'held' and row.homeless ~= '1'
  if not waiting and not evict then
    if token == '' then return { 'NOTOKEN' } end
    if token ~= row.token then return remember(rid, body, { 'STALE' }) end
  end

  if context ~= '' then
    row.ctx = context
    call('HSET', key, 'ctx', context)
  end
  if context ~= '' and row.st == 'live' then
    -- The last growth, known only now, belongs to the session's peak.
    local home = fields(P .. 'i:' .. row.inst, 'bs')
    set_blocks(sid, row.class, row.inst, own_blocks(tonumber(context), tonumber(home.bs), tonumber(row.shr or 0)))
  end
  -- A failure may be the first sign that an engine is gone: until anything is heard of it nobody new goes there.
  if outcome == 'FAILED' and row.st == 'live' then call('HSET', P .. 'i:' .. row.inst, 'failed_at', text(now)) end
  if outcome == 'COMPLETED' and row.st == 'live' then call('HDEL', P .. 'i:' .. row.inst, 'failed_at') end
  local kind, reason = 'release', outcome
  if evict then kind, reason = 'evict', ARGV[4] end
  local duration, z, peak = finish(sid, row, outcome, kind, reason)
  if outcome == 'PAUSED' then remember_paused(sid, tonumber(ARGV[2])) end
  return remember(rid, body, { 'RELEASED', duration, z, peak })
end

local answers = {}
for at = 6, 6 * tonumber(ARGV[5]), 6 do
  answers[#answers + 1] = release(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5])
end
return answers
