-- Makes a pool known that a server's own configuration names.
-- include: _base
--
-- Returns 1
call('HSET', POOL, 'named', 1)
return 1
