-- The end of a session, whatever brought it about. Needs _ledger, _queue and _events.
local RESIDENCY_KEPT_MS = 600000

-- `row` holds st, class, inst, group, admitted and ctx. Returns duration, block-time and peak.
local function finish(sid, row, outcome, kind, reason)
  local key = P .. 's:' .. sid
  -- First, as a full store refuses a script's first write unless it frees something, and an end is never refused.
  call('ZREM', P .. 'leases', sid)
  if row.st == 'live' then leave_home(sid, row) end
  if row.st == 'held' then dequeue(sid, row.class) end
  local admitted = row.admitted and row.admitted ~= '' and tonumber(row.admitted) or nil
  local cost = fields(key, 'z', 'peak', 'ask', 'declared', 'turn', 'gapn', 'gap', 'mis', 'endctx', 'endclears')
  local duration = admitted and math.max(0, now - admitted) or 0
  local z, peak = admitted and cost.z or '0', admitted and cost.peak or '0'
  if admitted then
    call('HINCRBY', CLASSES, 'rel:' .. row.class, 1)
    if outcome == 'COMPLETED' then call('HINCRBY', CLASSES, 'done:' .. row.class, 1) end
    local done = P .. 'done:' .. sid
    call('HSET', done, 'class', row.class, 'outcome', outcome, 'duration', text(duration), 'z', z, 'peak', peak,
      'ctx', row.ctx or '', 'inst', row.inst or '', 'admitted', row.admitted, 'ask', cost.ask or '',
      'declared', cost.declared or '', 'turn', cost.turn or '', 'gapn', cost.gapn or 0, 'gap', cost.gap or 0,
      'mis', cost.mis or '0')
    call('PEXPIRE', done, RESIDENCY_KEPT_MS)
  end
  if outcome == 'PAUSED' then
    if row.st == 'live' then
      -- What it leaves in the cache there may serve it again.
      local home = fields(P .. 'i:' .. row.inst, 'inc', 'clears')
      local left = (cost.endctx or '') ~= '' and cost.endclears or home.clears or '0'
      call('HSET', key, 'was', row.inst, 'was_inc', home.inc, 'was_clears', left, 'was_ctx', row.ctx or '0')
    end
    call('HSET', key, 'st', 'paused', 'phase', 'PAUSED', 'inst', '', 'inc', '', 'homeless', 0, 'reason', '')
  else
    call('DEL', key)
    call('ZREM', P .. 'sessions', sid)
  end
  touch(sid)
  emit(kind, sid, row.inst or '', '', reason, 'outcome', outcome, 'duration_ms', text(duration), 'block_ms', z)
  wake(kind)
  return text(duration), z, peak
end

-- Keeps what is known of a paused session for a while. Needs _lease.
local function remember_paused(sid, kept_ms)
  call('ZADD', P .. 'leases', text(now + kept_ms), sid)
  call('PEXPIRE', P .. 's:' .. sid, text(kept_ms + BACKSTOP_MS))
end
