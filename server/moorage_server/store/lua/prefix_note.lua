-- Notes what was sent to an instance whose engine does not say itself what it caches.
-- include: _base _prefix
--
-- ARGV  2 instance  3 incarnation  4 most hashes to keep  5 block that the first hash names  6 hashes, 8 bytes each
-- Returns 1 if it was noted, else 0
local ikey = ARGV[2]
local row = fields(P .. 'i:' .. ikey, 'inc', 'px_src', 'px_at')
if row.inc ~= ARGV[3] then return 0 end
if row.px_src == 'events' then
  if now - tonumber(row.px_at) < SET_KEPT_MS then return 0 end
  call('HDEL', P .. 'i:' .. ikey, 'px_stream', 'px_seq', 'px_behind')
end
add_hashes(ikey, split_hashes(ARGV[6]), tonumber(ARGV[5]))
settle_index(ikey, tonumber(ARGV[4]), 'px_src', 'placed')
return 1
