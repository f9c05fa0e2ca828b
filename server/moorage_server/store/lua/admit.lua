-- Admits a session: checks and commits the first candidate that still fits, else puts the session in the queue.
-- include: _base _events _replay _ledger _queue _lease
--
-- ARGV  2 request id ('' = none)   3 hash of the request's body   4 session   5 class in force   6 declared class
--       7 group ('' = none)        8 policy version ('' = unknown)  9 tokens to book  10 ask, as the policy reads it (opaque)
--       11 lease ttl               12 token nonce                 13 reason of the hold  14 detail of the hold
--       15 retry after             16 place in the queue kept for  17 present for (so long nobody passes it)
--       18 1 = observe: commit without guards                     19 step of the class's virtual time
--       20 credit of virtual time  21 REJECT = refuse for good, else ''  22 'UNLABELLED' | 'UNKNOWN' | ''  23 group size
--       24 number of passed classes, then their names, then number of candidates, then for each:
--       instance, incarnation, session cap, class cap (-1 = none), blocks of shared prefix, blocks of first prefill,
--       expected cached tokens, number of guards n, n asks, n limits
-- Returns {'PLACED', instance, incarnation, token, ttl, expires, cached, moved} | {'LIVE', the same}
--       | {'HELD', reason, retry after, position, ahead, held since, detail} | {'REJECTED', reason, since, detail} | {'REUSED'}
local rid, body, sid, class = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key = P .. 's:' .. sid

local before = replayed(rid, body)
if before then return before end

local old = fields(key, 'st', 'class', 'inst', 'inc', 'token', 'ttl', 'endctx', 'rank', 'since', 'homeless', 'admitted',
  'reason', 'ctx')
call('HINCRBY', POOL, 'decisions', 1)

if old.st == 'live' then
  local expires = renew(sid, tonumber(old.ttl))
  return remember(rid, body, { 'LIVE', old.inst, old.inc, old.token, old.ttl, text(expires), old.endctx or '', 0 })
end
local homeless = old.homeless == '1'
if old.st == 'held' then class = old.class end

if ARGV[22] ~= '' and not old.st then call('HINCRBY', POOL, ARGV[22] == 'UNKNOWN' and 'unknown' or 'unlabelled', 1) end

if ARGV[21] == 'REJECT' then
  if old.st == 'held' then dequeue(sid, class) end
  call('DEL', key)
  call('ZREM', P .. 'sessions', sid)
  call('ZREM', P .. 'leases', sid)
  touch(sid)
  emit('reject', sid, '', 'DECISION_REJECT', ARGV[13], 'class', class, 'detail', ARGV[14])
  return remember(rid, body, { 'REJECTED', ARGV[13], old.since or text(now), ARGV[14] })
end

-- Rank of first arrival. The samples of one prompt share the rank of the first of them, so that they stay together.
local function rank_of_arrival()
  if ARGV[7] == '' then return call('HINCRBY', POOL, 'rank', 1) end
  local memo = P .. 'gr:' .. ARGV[7]
  local rank = call('GET', memo) or call('HINCRBY', POOL, 'rank', 1)
  call('SET', memo, rank, 'PX', 600000)
  return rank
end

local passed, at = {}, 25
for i = 1, tonumber(ARGV[24]) do
  passed[i] = ARGV[at]
  at = at + 1
end
local candidates = tonumber(ARGV[at])
at = at + 1

local reason, detail = ARGV[13], ARGV[14]

-- Why the candidate at ARGV[at] can not take the session any more, or nil.
local function refusal(row, n)
  if row.inc ~= ARGV[at + 1] or row.gone == '1' then return 'NO_INSTANCE' end
  if row.cordon == '1' or row.drain == '1' then return 'DRAINING' end
  if ARGV[18] == '1' then return nil end
  if tonumber(row.ses or 0) >= tonumber(ARGV[at + 2]) then return 'POOL_CAP' end
  local cap = tonumber(ARGV[at + 3])
  if cap >= 0 and tonumber(call('HGET', P .. 'i:' .. ARGV[at], 'c:' .. class) or 0) >= cap then return 'CLASS_CAP' end
  local needs = {}
  for need in string.gmatch(row.need or '', '[^,]+') do needs[#needs + 1] = tonumber(need) end
  for i = 1, n do
    if (needs[i] or 0) + tonumber(ARGV[at + 7 + i]) > tonumber(ARGV[at + 7 + n + i]) then return 'KV_BUDGET' end
  end
  return nil
end

-- Adds the asks to a comma-separated vector; an empty one counts as zeros.
local function add(vector, n)
  local sums, i = {}, 0
  for value in string.gmatch(vector or '', '[^,]+') do
    i = i + 1
    sums[i] = tonumber(value)
  end
  for j = 1, n do sums[j] = text((sums[j] or 0) + tonumber(ARGV[at + 7 + j])) end
  return table.concat(sums, ',')
end

local function commit(row, n)
  local ikey = ARGV[at]
  local tokens = homeless and tonumber(old.ctx) or tonumber(ARGV[9])
  local gen = call('HINCRBY', POOL, 'gen', 1)
  local token = text(gen) .. '.' .. ARGV[12]
  if old.st == 'held' then dequeue(sid, class) end
  call('HSET', key, 'st', 'live', 'class', class, 'declared', ARGV[6], 'group', ARGV[7], 'gsize', ARGV[23], 'pv', ARGV[8],
    'inst', ikey, 'inc', row.inc, 'token', token, 'homeless', 0, 'phase', 'PLACED', 'blocks', 0, 'at', now, 'reason', '',
    'present', 0, 'ctx_at', now)
  if not homeless then
    call('HSET', key, 'ttl', ARGV[11], 'admitted', now, 'z', 0, 'peak', 0, 'ctx', ARGV[9], 'ask', ARGV[10],
      'rank', old.rank or rank_of_arrival(), 'since', old.since or now, 'endctx', '', 'turn', '', 'endturn', '')
    call('HINCRBY', CLASSES, 'adm:' .. class, 1)
    -- Start-time fair queueing between classes: a class that was idle may catch up by its credit at most.
    local global = tonumber(call('HGET', POOL, 'gvt') or 0)
    local start = math.max(tonumber(call('HGET', CLASSES, 'vt:' .. class) or 0), global - tonumber(ARGV[20]))
    call('HSET', CLASSES, 'vt:' .. class, text(start + tonumber(ARGV[19])), 'pass:' .. class, 0)
    if start > global then call('HSET', POOL, 'gvt', text(start)) end
    for _, name in ipairs(passed) do call('HINCRBY', CLASSES, 'pass:' .. name, 1) end
  end
  local block_size = tonumber(row.bs)
  local shared = join_group(ikey, ARGV[7], class, tonumber(ARGV[at + 4]))
  accrue_class(class)
  call('HINCRBY', CLASSES, 'act:' .. class, 1)
  call('HINCRBY', P .. 'i:' .. ikey, 'ses', 1)
  call('HINCRBY', P .. 'i:' .. ikey, 'c:' .. class, 1)
  call('SADD', P .. 'home:' .. ikey, sid)
  call('ZADD', P .. 'sessions', 0, sid)
  call('HSET', key, 'shr', shared)
  set_blocks(sid, class, ikey, own_blocks(tokens, block_size, shared))
  call('HSET', P .. 'i:' .. ikey, 'need', add(row.need, n), 'added', add(row.added, n))
  call('HINCRBY', P .. 'i:' .. ikey, 'backlog', ARGV[at + 5])
  local ttl = homeless and old.ttl or ARGV[11]
  local expires = renew(sid, tonumber(ttl))
  touch(sid)
  emit(homeless and 'move' or 'admit', sid, ikey, 'DECISION_PLACE', reason, 'class', class, 'detail', detail)
  local answer = { 'PLACED', ikey, row.inc, token, ttl, text(expires), ARGV[at + 6], homeless and 1 or 0 }
  return remember(rid, body, answer)
end

if candidates > 0 and ARGV[18] ~= '1' and not first_in_line(sid, class) then
  reason, detail = 'QUEUED_BEHIND', 'an earlier session of the class goes first'
  candidates = 0
end
for _ = 1, candidates do
  local n = tonumber(ARGV[at + 7])
  local row = fields(P .. 'i:' .. ARGV[at], 'inc', 'gone', 'cordon', 'drain', 'ses', 'need', 'added', 'bs')
  local why = refusal(row, n)
  if not why then return commit(row, n) end
  reason, detail = why, 'taken by another session in the meantime'
  at = at + 8 + 2 * n
end

-- Held: recorded in the ledger of demand, in order of first arrival.
local since = old.since or text(now)
if not old.st or old.st == 'paused' then
  local rank = old.rank or rank_of_arrival()
  call('HSET', key, 'st', 'held', 'class', class, 'declared', ARGV[6], 'group', ARGV[7], 'gsize', ARGV[23], 'pv', ARGV[8],
    'ctx', ARGV[9], 'ask', ARGV[10], 'rank', rank, 'since', since, 'ttl', ARGV[11], 'homeless', 0, 'phase', 'HELD',
    'inst', '', 'admitted', '')
  call('PEXPIRE', key, text(tonumber(ARGV[16]) + BACKSTOP_MS))
  if old.st == 'paused' then call('ZREM', P .. 'leases', sid) end
  call('ZADD', P .. 'sessions', 0, sid)
  enqueue(sid, class, tonumber(rank))
  touch(sid)
end
if reason ~= old.reason or old.st ~= 'held' then
  emit('hold', sid, '', 'DECISION_HOLD', reason, 'class', class, 'detail', detail)
end
call('HSET', key, 'reason', reason, 'detail', detail, 'retry', ARGV[15], 'present', text(now + tonumber(ARGV[17])))
-- A homeless session is held, but leased: its lease ends it, not the patience of the queue.
if not homeless then call('ZADD', P .. 'held', text(now + tonumber(ARGV[16])), sid) end
local position, ahead = standing(sid, class)
return { 'HELD', reason, ARGV[15], position, ahead, since, detail }
