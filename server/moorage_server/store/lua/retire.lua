-- Leaves nothing of a pool that no snapshot and no configuration ever named, once its last session is gone.
-- include: _base
--
-- Returns 1 if nothing is left, 0 if the pool is in use
if call('HEXISTS', POOL, 'named') == 1 or call('ZCARD', P .. 'sessions') > 0 then return 0 end
for _, name in ipairs({ 'classes', 'changed', 'leases', 'held', 'queues', 'events', 'policy', 'state', 'tick' }) do
  call('DEL', P .. name)
end
call('DEL', POOL)
return 1
