-- Marks the start or the end of a weight update of one instance. Its sessions stay booked.
-- include: _base _events _epoch _prefix
--
-- ARGV  2 instance  3 'begin' | 'end'  4 weight version (at the end '' = the old weights stay)
--       5 policy version it is ('' = unknown)  6 begin: 'hold' = no new sessions meanwhile, 'open' = as before
--       7 end: 1 = the cache was cleared, '' = not known to have been  8 reason, for the event
-- Returns 1 if that changed anything, 0 if not or if the instance is unknown
local ikey, version = ARGV[2], ARGV[4]
local key = P .. 'i:' .. ikey
local row = fields(key, 'inc', 'upd', 'wv')
if not row.inc then return 0 end

if ARGV[3] == 'begin' then
  call('HSET', key, 'upd', ARGV[6])
  if row.upd then return 0 end
  call('HSET', key, 'upd_at', text(now))
  emit('weights', '', ikey, '', 'begun', 'version', version, 'cleared', 0)
  wake('weights')
  return 1
end

local changed = row.upd ~= nil or (version ~= '' and version ~= row.wv)
call('HDEL', key, 'upd', 'upd_at')
if version ~= '' then
  call('HSET', key, 'wv', version, 'pv', ARGV[5])
  call('HSET', POOL, 'wv', version, 'pv', ARGV[5])
end
if not changed and ARGV[7] ~= '1' then return 0 end
new_epoch(ikey, ARGV[7] == '1', ARGV[8], version)
if ARGV[7] == '1' then forget_prefixes(ikey) end
wake('weights')
return 1
