-- Says where the next requests of living sessions go. A living home is always the answer.
-- include: _base _events _replay _ledger _queue _detach _lease _phase _grace _epoch
--
-- ARGV  2 silence after which an instance is gone  3 number of items, then for each:
--       request id, hash of the body, session, token, turn ('' = unknown), prompt tokens ('' = unknown)
-- Returns for each item, in order:
--         {'PLACED', instance, incarnation, token, ttl, expires, cached, moved = 0, class}
--       | {'HOMELESS', why, ask, class, tokens, group, policy version}     to be placed anew, through admit.lua
--       | {'WAIT', state, class}                home is alive but does not serve
--       | {'UNKNOWN', 1 if the pool is known} | {'STALE'} | {'HELDSTATE'} | {'REUSED'}
local function place(rid, body, sid, token, turn, prompt)
  local key = P .. 's:' .. sid

  local before = replayed(rid, body)
  if before then return before end

  local row = fields(key, 'st', 'class', 'inst', 'inc', 'token', 'ttl', 'endctx', 'rank', 'homeless', 'ctx', 'group',
    'shr', 'ask', 'pv', 'phase', 'gap_at', 'endclears', 'cached')
  if not row.st or row.st == 'paused' then
    local unknown = { 'UNKNOWN', call('HEXISTS', POOL, 'named') }
    -- A pool that is not known may be about to register, so that is not final.
    return unknown[2] == 1 and remember(rid, body, unknown) or unknown
  end
  if row.st == 'held' and row.homeless ~= '1' then return { 'HELDSTATE' } end
  if row.token ~= token then return remember(rid, body, { 'STALE' }) end
  call('HINCRBY', POOL, 'decisions', 1)

  local why = 'home is gone'
  if row.st == 'live' then
    local home = fields(P .. 'i:' .. row.inst, 'seen', 'state', 'drain', 'bs', 'gone', 'clears')
    local silent = now - tonumber(home.seen or 0) >= tonumber(ARGV[2]) and not in_grace()
    if home.drain == '1' or home.state == 'DRAINING' then
      why = 'home is draining'
      detach(sid, row, why)
    elseif home.state == 'STOPPED' or home.gone == '1' or silent then
      detach(sid, row, why)
    elseif home.state == 'PAUSED' or home.state == 'SLEEPING' then
      renew(sid, tonumber(row.ttl))
      claim(rid, body)
      return { 'WAIT', home.state, row.class }
    else
      local tokens = tonumber(prompt)
      set_phase(sid, row, 'RUNNING')
      if turn ~= '' then call('HSET', key, 'turn', turn) end
      if tokens and tokens > tonumber(row.ctx) then
        call('HSET', key, 'ctx', prompt, 'ctx_at', now)
        set_blocks(sid, row.class, row.inst, own_blocks(tokens, tonumber(home.bs), tonumber(row.shr)))
      end
      touch(sid)
      local expires = renew(sid, tonumber(row.ttl))
      local cached = left_behind(row, home)
      if cached == '' and row.endclears == (home.clears or '0') then cached = row.cached or '' end
      local answer = { 'PLACED', row.inst, row.inc, row.token, row.ttl, text(expires), cached, 0, row.class }
      return remember(rid, body, answer)
    end
  end
  if prompt ~= '' and tonumber(prompt) > tonumber(row.ctx) then
    call('HSET', key, 'ctx', prompt)
    row.ctx = prompt
  end
  renew(sid, tonumber(row.ttl))
  return { 'HOMELESS', why, row.ask or '', row.class, row.ctx, row.group or '', row.pv or '' }
end

local answers = {}
for at = 4, 6 * tonumber(ARGV[3]) - 2, 6 do
  answers[#answers + 1] = place(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5])
end
return answers
