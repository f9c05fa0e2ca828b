-- A session whose home is gone waits ahead of everything that never had one. Needs _ledger, _queue and _events.
local HOMELESS_LEAD = 1000000000000

-- Turns a living session whose home is lost into a held one: still leased, ahead of new sessions.
local function detach(sid, row, why)
  leave_home(sid, row)
  call('HSET', P .. 's:' .. sid, 'st', 'held', 'homeless', 1, 'inst', '', 'inc', '', 'reason', 'NO_INSTANCE', 'shr', 0,
    'endctx', '', 'present', 0)
  enqueue(sid, row.class, tonumber(row.rank) - HOMELESS_LEAD)
  touch(sid)
  emit('detach', sid, row.inst, '', why)
end
