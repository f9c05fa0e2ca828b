-- Marks the start or the end of a weight update, of one instance or of a whole pool. Sessions stay booked.
-- include: _base _events _lease _epoch _prefix
--
-- ARGV  2 instance ('' = the pool: for instances that come meanwhile)  3 'begin' | 'end'
--       4 weight version (at the end '' = the old weights stay)  5 policy version it is ('' = unknown)
--       6 begin: 'hold' = no new sessions meanwhile, 'open' = as before
--       7 end: 1 = the cache was cleared, '' = not known to have been  8 reason, for the event
--       9 end: 1 = the trainer itself named the policy version
-- Returns 1 if that changed anything, 0 if not or if the instance is unknown
local ikey, version = ARGV[2], ARGV[4]
local key = ikey == '' and POOL or P .. 'i:' .. ikey
local row = fields(key, 'inc', 'upd', 'upd_v', 'wv')
if ikey ~= '' and not row.inc then return 0 end

if ARGV[3] == 'begin' then
  call('HSET', key, 'upd', ARGV[6])
  if row.upd and row.upd_v == version then return 0 end
  -- Another version is another update: it gets its own time.
  call('HSET', key, 'upd_at', text(now), 'upd_v', version)
  if ikey == '' or row.upd then return 0 end
  emit('weights', '', ikey, '', 'begun', 'version', version, 'cleared', 0)
  wake('weights')
  return 1
end

local changed = row.upd ~= nil or (version ~= '' and version ~= row.wv)
call('HDEL', key, 'upd', 'upd_at', 'upd_v')
if version ~= '' then
  call('HSET', POOL, 'wv', version, 'pv', ARGV[5])
  if ARGV[9] == '1' then call('HSET', POOL, 'pv_told', 1) end
end
if ikey == '' then return 0 end
if version ~= '' then call('HSET', key, 'wv', version, 'pv', ARGV[5]) end
if row.upd then renew_home(ikey) end
if not changed and ARGV[7] ~= '1' then return 0 end
new_epoch(ikey, ARGV[7] == '1', ARGV[8], version)
if ARGV[7] == '1' then forget_prefixes(ikey) end
wake('weights')
return 1
