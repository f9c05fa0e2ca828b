-- Takes progress reports of sessions: renews their leases, follows their blocks, collects the continuation-hit signal.
-- include: _base _ledger _lease _phase
--
-- ARGV  2 number of items, then for each: session, token, phase, turn, context, cached, output ('' = unknown)
-- Returns for each item: 'OK', ttl, expires | 'UNKNOWN', '', '' | 'STALE', '', ''
local answer, at = {}, 3

-- Expected: all whole blocks of the context that the last turn left behind, less its last token, which was never
-- computed as a prompt. Found: what the engine took from its cache. Of a turn that ended in another epoch of the
-- instance nothing is expected: the cache may have gone with the weights.
local function count_hits(row, home, cached)
  if not row.endctx or row.endctx == '' or row.endep ~= (home.ep or '0') or home.upd then return end
  local block_size = tonumber(home.bs)
  local expected = math.floor((tonumber(row.endctx) - 1) / block_size) * block_size
  if expected <= 0 then return end
  local found = math.min(expected, cached)
  local key = P .. 'i:' .. row.inst
  call('HSET', key, 'hat', text(now))
  call('HINCRBY', key, 'hexp:' .. row.class, text(expected))
  call('HINCRBY', key, 'hgot:' .. row.class, text(found))
  call('HINCRBY', CLASSES, 'hexp:' .. row.class, text(expected))
  call('HINCRBY', CLASSES, 'hgot:' .. row.class, text(found))
end

local function report(sid, row, phase, turn, context, cached, output)
  local key = P .. 's:' .. sid
  local home = fields(P .. 'i:' .. row.inst, 'bs', 'ep', 'upd', 'clears', 'failed_at')
  local block_size = tonumber(home.bs)
  if phase ~= '' then set_phase(sid, row, phase) end
  if turn ~= '' then call('HSET', key, 'turn', turn) end
  if output ~= '' then call('HSET', key, 'output', output) end
  local newer = not row.endturn or row.endturn == '' or (tonumber(turn) or 0) > tonumber(row.endturn)
  local ended = cached ~= '' and turn ~= '' and newer
  -- An engine that ended a turn is there, whatever failed on it before.
  if ended and home.failed_at then call('HDEL', P .. 'i:' .. row.inst, 'failed_at') end
  if ended then
    count_hits(row, home, tonumber(cached))
    call('HSET', key, 'endturn', turn, 'endctx', context, 'endep', home.ep or 0, 'endclears', home.clears or 0)
  end
  if context ~= '' then
    call('HSET', key, 'ctx', context, 'ctx_at', now)
    set_blocks(sid, row.class, row.inst, own_blocks(tonumber(context), block_size, tonumber(row.shr or 0)))
  end
  touch(sid)
end

for _ = 1, tonumber(ARGV[2]) do
  local sid = ARGV[at]
  local row = fields(P .. 's:' .. sid, 'st', 'class', 'inst', 'token', 'ttl', 'phase', 'shr', 'endctx', 'endturn',
    'endep', 'gap_at', 'homeless')
  local alive = row.st == 'live' or (row.st == 'held' and row.homeless == '1')
  if not alive then
    answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = 'UNKNOWN', '', ''
  elseif row.token ~= ARGV[at + 1] then
    answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = 'STALE', '', ''
  else
    if row.st == 'live' then
      report(sid, row, ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5], ARGV[at + 6])
    end
    local expires = renew(sid, tonumber(row.ttl))
    answer[#answer + 1], answer[#answer + 2], answer[#answer + 3] = 'OK', row.ttl, text(expires)
  end
  at = at + 7
end
return answer
