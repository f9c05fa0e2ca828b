-- Admits a session: checks and commits the first candidate that still fits, else puts the session in the queue.
-- include: _base _events _replay _ledger _queue _lease _vector _candidate _epoch _former _label _fair
--
-- ARGV  2 request id ('' = none)   3 hash of the request's body   4 session   5 class in force   6 declared class
--       7 group ('' = none)        8 policy version ('' = unknown)  9 tokens to book
--       10 ask, as the policy reads it (opaque)  11 lease ttl     12 token nonce
--       13 reason of the hold      14 detail of the hold
--       15 retry after             16 place in the queue kept for  17 present for (so long nobody passes it)
--       18 1 = observe: commit without guards                     19 step of the class's virtual time
--       20 credit of virtual time  21 REJECT = refuse for good, else ''  22 JSON: what the label is worth (_label)
--       23 group size              24 ticket of the call, for withdraw.lua
--       25 1 = the caller waits inside the call
--       26 1 = the caller knows where a paused session was at home
--       27 number of candidates, then for each: instance, incarnation, and three comma-separated vectors:
--       session cap, blocks of shared prefix, blocks of first prefill, expected cached tokens; asks; limits
-- Returns {'PLACED', instance, incarnation, token, ttl, expires, cached, moved, class} | {'LIVE', the same}
--       | {'HELD', reason, retry after, position, ahead, held since, detail, class}
--       | {'REJECTED', reason, since, detail, class} | {'REUSED'}
--       | {'RESUMED', former home, its incarnation, tokens left there}     nothing is done yet: decide with that
local rid, body, sid, class = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local observe = ARGV[18] == '1'
local key = P .. 's:' .. sid

local old = fields(key, 'st', 'class', 'inst', 'inc', 'token', 'ttl', 'endctx', 'rank', 'since', 'homeless', 'reason',
  'ctx', 'group', 'ticket', 'waits', 'endclears', 'was', 'was_inc', 'was_clears', 'was_ctx')
local before = replayed(rid, body)
if before then
  -- Two calls have the answer now: the end of one must not take it from the other.
  if old.st == 'live' then call('HSET', key, 'ticket', '') end
  return before
end
if old.was and ARGV[26] ~= '1' and cache_kept(old) then return { 'RESUMED', old.was, old.was_inc, old.was_ctx } end
call('HINCRBY', POOL, 'decisions', 1)

if old.st == 'live' then
  local expires = renew(sid, tonumber(old.ttl))
  call('HSET', key, 'ticket', '')
  local cached = left_behind(old, fields(P .. 'i:' .. old.inst, 'clears'))
  return remember(rid, body, { 'LIVE', old.inst, old.inc, old.token, old.ttl, text(expires), cached, 0, old.class })
end
-- A homeless session stays what it was admitted as; a held one stays in its queue.
local homeless = old.homeless == '1'
local group = homeless and old.group or ARGV[7]
if old.st == 'held' then class = old.class end

if ARGV[21] == 'REJECT' and not homeless then
  if old.st == 'held' then dequeue(sid, class) end
  call('DEL', key)
  call('ZREM', P .. 'sessions', sid)
  call('ZREM', P .. 'leases', sid)
  touch(sid)
  emit('reject', sid, '', 'DECISION_REJECT', ARGV[13], 'class', class, 'detail', ARGV[14])
  return remember(rid, body, { 'REJECTED', ARGV[13], old.since or text(now), ARGV[14], class })
end

if old.st ~= 'held' then
  local label = cjson.decode(ARGV[22])
  class = bounded(class, label)
  note_label(sid, class, ARGV[6], label, not old.st)
end

local candidates, at = tonumber(ARGV[27]), 28

local reason, detail = ARGV[13], ARGV[14]

-- What a session is called and asks for, from its first try to its admission.
local function describe(rank, since)
  call('HSET', key, 'class', class, 'declared', ARGV[6], 'group', group, 'gsize', ARGV[23], 'pv', ARGV[8],
    'ctx', ARGV[9], 'ask', ARGV[10], 'ttl', ARGV[11], 'rank', rank, 'since', since)
end

local function commit(c, row)
  local tokens = homeless and tonumber(old.ctx) or tonumber(ARGV[9])
  local token = text(call('HINCRBY', POOL, 'gen', 1)) .. '.' .. ARGV[12]
  if old.st == 'held' then dequeue(sid, class) end
  call('HSET', key, 'st', 'live', 'inst', c.ikey, 'inc', row.inc, 'token', token, 'homeless', 0, 'phase', 'PLACED',
    'blocks', 0, 'at', now, 'reason', '', 'present', 0, 'ctx_at', now, 'ticket', homeless and '' or ARGV[24],
    'endclears', row.clears or 0)
  if not homeless then
    describe(old.rank or rank_of_arrival(group), old.since or now)
    call('HSET', key, 'admitted', now, 'z', 0, 'd', 0, 'gap', 0, 'gapn', 0, 'peak', 0, 'endctx', '', 'turn', '',
      'endturn', '')
    call('HDEL', key, 'was', 'was_inc', 'was_clears', 'was_ctx')
    call('HINCRBY', CLASSES, 'adm:' .. class, 1)
    take_turn(class, old.st == 'held', tonumber(ARGV[19]), tonumber(ARGV[20]))
  end
  local shared = join_group(c.ikey, group, class, c.shared)
  call('HSET', key, 'shr', shared, 'cached', c.cached ~= '0' and c.cached or '')
  move_in(sid, class, c.ikey)
  set_blocks(sid, class, c.ikey, own_blocks(tokens, tonumber(row.bs), shared))
  call('HSET', P .. 'i:' .. c.ikey, 'need', with_asks(row.need, c.asks), 'added', with_asks(row.added, c.asks))
  call('HINCRBY', P .. 'i:' .. c.ikey, 'backlog', c.prefill)
  call('ZADD', P .. 'sessions', 0, sid)
  local ttl = homeless and old.ttl or ARGV[11]
  local expires = renew(sid, tonumber(ttl))
  touch(sid)
  -- In OBSERVE the event says what ENFORCE would have held it for.
  local why, told = observe and reason or '', observe and detail or ''
  emit(homeless and 'move' or 'admit', sid, c.ikey, 'DECISION_PLACE', why, 'class', class, 'detail', told)
  local answer = { 'PLACED', c.ikey, row.inc, token, ttl, text(expires), c.cached, homeless and 1 or 0, class }
  return remember(rid, body, answer)
end

if candidates > 0 and not observe and not first_in_line(sid, class) then
  reason, detail = 'QUEUED_BEHIND', 'an earlier session of the class goes first'
  candidates = 0
end
for _ = 1, candidates do
  local c, following = read_candidate(at)
  local row = fields(P .. 'i:' .. c.ikey, 'inc', 'gone', 'cordon', 'drain', 'state', 'upd', 'failed_at', 'clears',
    'ses', 'need', 'added', 'bs')
  local why = refusal(c, row, observe)
  if not why then return commit(c, row) end
  reason, detail, at = why, 'taken by another session in the meantime', following
end

-- Held: recorded in the ledger of demand, in order of first arrival.
local since = old.since or text(now)
if old.st ~= 'held' then
  local rank = old.rank or rank_of_arrival(group)
  describe(rank, since)
  call('HSET', key, 'st', 'held', 'homeless', 0, 'phase', 'HELD', 'inst', '', 'admitted', '',
    'resumes', old.st == 'paused' and 1 or 0)
  call('PEXPIRE', key, text(tonumber(ARGV[16]) + BACKSTOP_MS))
  call('ZREM', P .. 'leases', sid)
  call('ZADD', P .. 'sessions', 0, sid)
  call('HSET', CLASSES, 'vt:' .. class, text(virtual_start(class, false, tonumber(ARGV[20]))))
  enqueue(sid, class, tonumber(rank))
  touch(sid)
end
if reason ~= old.reason or old.st ~= 'held' then
  emit('hold', sid, '', 'DECISION_HOLD', reason, 'class', class, 'detail', detail)
end
-- A session that two calls wait for belongs to neither: the end of one must not take it from the other.
local present, shared = text(now + tonumber(ARGV[17])), old.ticket ~= ARGV[24] and tonumber(old.waits or 0) > now
call('HSET', key, 'reason', reason, 'detail', detail, 'retry', ARGV[15], 'present', present,
  'ticket', shared and '' or ARGV[24], 'waits', (ARGV[25] == '1' or shared) and present or 0)
-- A homeless session is held, but leased: its lease ends it, not the patience of the queue.
if homeless then renew(sid, tonumber(old.ttl)) else call('ZADD', P .. 'held', text(now + tonumber(ARGV[16])), sid) end
claim(rid, body)
local position, ahead = standing(sid, class)
return { 'HELD', reason, ARGV[15], position, ahead, since, detail, class }
