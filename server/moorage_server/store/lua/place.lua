-- Says where the next request of a living session goes. A living home is always the answer.
-- include: _base _events _replay _ledger _queue _detach _lease _phase _grace _epoch
--
-- ARGV  2 request id  3 hash of the body  4 session  5 token  6 turn ('' = unknown)  7 prompt tokens ('' = unknown)
--       8 silence after which an instance is gone
-- Returns {'PLACED', instance, incarnation, token, ttl, expires, cached, moved = 0, class}
--       | {'HOMELESS', why, ask, class, tokens, group, policy version}     to be placed anew, through admit.lua
--       | {'WAIT', state, class}                home is alive but does not serve
--       | {'UNKNOWN', 1 if the pool is known} | {'STALE'} | {'HELDSTATE'} | {'REUSED'}
local sid = ARGV[4]
local key = P .. 's:' .. sid

local before = replayed(ARGV[2], ARGV[3])
if before then return before end

local row = fields(key, 'st', 'class', 'inst', 'inc', 'token', 'ttl', 'endctx', 'rank', 'homeless', 'ctx', 'group',
  'shr', 'ask', 'pv', 'phase', 'gap_at', 'endclears', 'cached')
if not row.st or row.st == 'paused' then
  local unknown = { 'UNKNOWN', call('HEXISTS', POOL, 'named') }
  -- A pool that is not known may be about to register, so that is not final.
  return unknown[2] == 1 and remember(ARGV[2], ARGV[3], unknown) or unknown
end
if row.st == 'held' and row.homeless ~= '1' then return { 'HELDSTATE' } end
if row.token ~= ARGV[5] then return remember(ARGV[2], ARGV[3], { 'STALE' }) end
call('HINCRBY', POOL, 'decisions', 1)

local why = 'home is gone'
if row.st == 'live' then
  local home = fields(P .. 'i:' .. row.inst, 'seen', 'state', 'drain', 'bs', 'gone', 'clears')
  local silent = now - tonumber(home.seen or 0) >= tonumber(ARGV[8]) and not in_grace()
  if home.drain == '1' or home.state == 'DRAINING' then
    why = 'home is draining'
    detach(sid, row, why)
  elseif home.state == 'STOPPED' or home.gone == '1' or silent then
    detach(sid, row, why)
  elseif home.state == 'PAUSED' or home.state == 'SLEEPING' then
    renew(sid, tonumber(row.ttl))
    claim(ARGV[2], ARGV[3])
    return { 'WAIT', home.state, row.class }
  else
    local prompt = tonumber(ARGV[7])
    set_phase(sid, row, 'RUNNING')
    if ARGV[6] ~= '' then call('HSET', key, 'turn', ARGV[6]) end
    if prompt and prompt > tonumber(row.ctx) then
      call('HSET', key, 'ctx', ARGV[7], 'ctx_at', now)
      set_blocks(sid, row.class, row.inst, own_blocks(prompt, tonumber(home.bs), tonumber(row.shr)))
    end
    touch(sid)
    local expires = renew(sid, tonumber(row.ttl))
    local cached = left_behind(row, home)
    if cached == '' and row.endclears == (home.clears or '0') then cached = row.cached or '' end
    local answer = { 'PLACED', row.inst, row.inc, row.token, row.ttl, text(expires), cached, 0, row.class }
    return remember(ARGV[2], ARGV[3], answer)
  end
end
if ARGV[7] ~= '' and tonumber(ARGV[7]) > tonumber(row.ctx) then
  call('HSET', key, 'ctx', ARGV[7])
  row.ctx = ARGV[7]
end
renew(sid, tonumber(row.ttl))
return { 'HOMELESS', why, row.ask or '', row.class, row.ctx, row.group or '', row.pv or '' }
