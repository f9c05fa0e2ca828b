-- Epochs of an instance: its weights, or its cache, changed under its sessions. What a turn finds in the cache says
-- nothing about overload if the turn before it ended in another epoch. Needs _events.
local function new_epoch(ikey, cleared, reason, version)
  local key = P .. 'i:' .. ikey
  call('HINCRBY', key, 'ep', 1)
  if cleared then call('HINCRBY', key, 'clears', 1) end
  emit('weights', '', ikey, '', reason, 'version', version, 'cleared', cleared and 1 or 0)
end

-- Tokens of context that a session's last turn left in the cache of its home: '' where no turn is known to have ended,
-- '0' where the cache was cleared since.
local function left_behind(session, home)
  local tokens = session.endctx or ''
  if tokens ~= '' and session.endclears ~= (home.clears or '0') then return '0' end
  return tokens
end
