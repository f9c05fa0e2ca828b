-- Reads the sessions that changed since a revision, for the mirror of the epoch's holder.
-- include: _base
--
-- ARGV  2 owner  3 revision  4 most sessions to read
-- Returns {'OK', revision reached, 1 if there is more, {sid, fields of a living or held session | false,
--          fields of an ended one | false} ...} | {'FENCED'}
if call('GET', P .. 'tick') ~= ARGV[2] then return { 'FENCED' } end
-- A failover lost the last writes: what the holder mirrors of them never was, and the holder begins anew.
if tonumber(ARGV[3]) > tonumber(call('HGET', POOL, 'rev') or 0) then return { 'FENCED' } end
local limit = tonumber(ARGV[4])
local members = call('ZRANGEBYSCORE', P .. 'changed', '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
local rows, reached = {}, ARGV[3]
for i = 1, #members, 2 do
  local sid = members[i]
  reached = members[i + 1]
  local row = call('HMGET', P .. 's:' .. sid, 'st', 'class', 'inst', 'ctx', 'ctx_at', 'shr', 'phase', 'admitted', 'ask',
    'group', 'turn', 'since', 'declared', 'gapn', 'gap', 'inf', 'conf', 'mis', 'moves')
  local done = false
  if not row[1] or row[1] == 'paused' then
    local ended = call('HMGET', P .. 'done:' .. sid, 'class', 'outcome', 'duration', 'z', 'ctx', 'admitted', 'ask',
      'declared', 'turn', 'gapn', 'gap', 'mis')
    done = ended[1] and ended or false
    row = false
    call('ZREM', P .. 'changed', sid)
  end
  rows[#rows + 1] = { sid, row, done }
end
return { 'OK', reached, #members == 2 * limit and 1 or 0, rows }
