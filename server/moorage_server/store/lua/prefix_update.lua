-- Takes one part of what an engine says of its prefix cache. An update of many hashes comes in parts, each repeatable;
-- its sequence counts only with the last one, and until then the index is not to be relied on.
-- include: _base _prefix
--
-- ARGV  2 instance  3 incarnation  4 stream  5 sequence (20 digits)  6 the sequence before it (20 digits)
--       7 1 = reset: forget what was known before  8 1 = the sender missed something  9 1 = this is the last part
--       10 most hashes to keep  11 hashes removed, 8 bytes each  12 hashes stored, likewise
-- Returns 'OK' | 'REPEAT' (dropped: it was taken before) | 'NO_INSTANCE' | 'OTHER_INCARNATION' | 'OLD_INCARNATION'
--       | 'NEW_STREAM' (unknown, and no reset) | 'GAP'
local ikey = ARGV[2]
local row = fields(P .. 'i:' .. ikey, 'inc', 'px_stream', 'px_seq', 'px_at')
if not row.inc then return 'NO_INSTANCE' end
if row.inc ~= ARGV[3] then
  return call('SISMEMBER', P .. 'inc:' .. ikey, ARGV[3]) == 1 and 'OLD_INCARNATION' or 'OTHER_INCARNATION'
end
-- What was not heard of for so long has expired.
local known = row.px_stream == ARGV[4] and now - tonumber(row.px_at) < SET_KEPT_MS
-- A sender that begins anew under its old name means another record: it is asked for another name.
if known and ARGV[7] == '1' and ARGV[5] < row.px_seq then return 'NEW_STREAM' end
if known and ARGV[5] <= row.px_seq then return 'REPEAT' end
if ARGV[7] == '1' then
  call('UNLINK', P .. 'x:' .. ikey)
elseif not known then
  return 'NEW_STREAM'
elseif row.px_seq ~= ARGV[6] then
  return 'GAP'
end
local removed, last = split_hashes(ARGV[11]), ARGV[9] == '1'
if #removed > 0 then call('ZREM', P .. 'x:' .. ikey, unpack(removed)) end
add_hashes(ikey, split_hashes(ARGV[12]), 0)
settle_index(ikey, tonumber(ARGV[10]), 'px_src', 'events', 'px_stream', ARGV[4], 'px_seq', last and ARGV[5] or ARGV[6],
  'px_behind', last and ARGV[8] or '1')
return 'OK'
