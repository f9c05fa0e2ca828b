-- Sets an operator's mark on an instance, or takes it away.
-- include: _base _events
--
-- ARGV  2 instance  3 'cordon' | 'drain' | 'open'
-- Returns {1, sessions at home there} | {0, 0} if the instance is unknown
local key = P .. 'i:' .. ARGV[2]
if call('EXISTS', key) == 0 then return { 0, 0 } end
if ARGV[3] == 'cordon' then
  call('HSET', key, 'cordon', 1)
elseif ARGV[3] == 'drain' then
  call('HSET', key, 'drain', 1)
else
  call('HDEL', key, 'cordon', 'drain')
end
emit(ARGV[3], '', ARGV[2], '', 'operator')
wake('operator')
return { 1, tonumber(call('HGET', key, 'ses') or 0) }
