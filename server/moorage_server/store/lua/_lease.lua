-- Leases: one sorted set by expiry. Keys of a session also expire by themselves, long after its lease, so that nothing
-- is left behind by a pool that nobody serves any more.
local BACKSTOP_MS = 604800000

local function renew(sid, ttl)
  local expires = now + ttl
  call('ZADD', P .. 'leases', text(expires), sid)
  call('HSET', P .. 's:' .. sid, 'exp', text(expires))
  call('PEXPIRE', P .. 's:' .. sid, text(ttl + BACKSTOP_MS))
  return expires
end

-- States in which an engine stands still, and the leases of its sessions run on.
local STILL = { PAUSED = true, SLEEPING = true }

-- Gives all sessions at home on an instance a whole lease: it works again, and they have to hear of it first.
local function renew_home(ikey)
  for _, sid in ipairs(call('SMEMBERS', P .. 'home:' .. ikey)) do
    renew(sid, tonumber(call('HGET', P .. 's:' .. sid, 'ttl')))
  end
end
