-- Nobody kept the epoch for a while: server or store were away, so nobody could renew or report. Until the grace is
-- over, silence proves nothing.

local function in_grace()
  local row = fields(POOL, 'grace', 'alive', 'quiet')
  if tonumber(row.grace or 0) > now then return true end
  return row.alive ~= nil and now - tonumber(row.alive) > tonumber(row.quiet)
end
