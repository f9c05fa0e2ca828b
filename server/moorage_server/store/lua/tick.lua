-- Takes or keeps the epoch of a pool: one holder at a time, whatever the number of server processes.
-- include: _base
--
-- ARGV  2 owner  3 lease of the epoch  4 grace after an outage  5 silence of all holders that counts as an outage
--       6 1 = give it up
-- Returns {1 if the caller holds the epoch, now, end of the grace}
local key = P .. 'tick'
local holder = call('GET', key)
if ARGV[6] == '1' then
  if holder == ARGV[2] then call('DEL', key) end
  return { 0, text(now), '0' }
end
if holder and holder ~= ARGV[2] then return { 0, text(now), '0' } end
call('SET', key, ARGV[2], 'PX', ARGV[3])
local row = fields(POOL, 'alive', 'quiet', 'grace')
local grace = tonumber(row.grace or 0)
if row.alive and math.abs(now - tonumber(row.alive)) > tonumber(row.quiet) then
  grace = now + tonumber(ARGV[4])
  call('HSET', POOL, 'grace', text(grace))
end
call('HSET', POOL, 'alive', text(now), 'quiet', ARGV[5])
return { 1, text(now), text(grace) }
