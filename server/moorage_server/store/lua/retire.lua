-- Leaves nothing of a pool that no snapshot and no configuration ever named, once its last session is gone.
-- include: _base
--
-- Returns 1 if nothing is left, 0 if the pool is in use
if call('HEXISTS', POOL, 'named') == 1 or call('ZCARD', P .. 'sessions') > 0 then return 0 end
local names = { 'classes', 'changed', 'leases', 'held', 'queues', 'names', 'events', 'policy', 'state', 'tick' }
for _, name in ipairs(names) do
  call('DEL', P .. name)
end
call('DEL', POOL)
return 1
