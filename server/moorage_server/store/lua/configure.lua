-- Stores a pool's configuration.
-- include: _base _events _replay
--
-- ARGV  2 request id  3 hash of the body  4 configuration, serialised  5 version that it was made from ('' = any)
-- Returns {'OK', version} | {'CHANGED'} if another change came first | {'REUSED'}
local before = replayed(ARGV[2], ARGV[3])
if before then return before end
local version = call('HGET', POOL, 'cfgv') or '0'
if ARGV[5] ~= '' and ARGV[5] ~= version then return { 'CHANGED' } end
version = text(tonumber(version) + 1)
call('HSET', POOL, 'config', ARGV[4], 'cfgv', version, 'named', 1)
emit('configure', '', '', '', 'version ' .. version)
wake('configured')
return remember(ARGV[2], ARGV[3], { 'OK', version })
