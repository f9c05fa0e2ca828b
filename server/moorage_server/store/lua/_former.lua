-- Where a session was at home before it was paused.

-- Whether what the session left in the cache there may be there still: the same incarnation, not cleared since.
local function cache_kept(row)
  local home = fields(P .. 'i:' .. row.was, 'inc', 'clears', 'gone')
  return home.inc == row.was_inc and home.gone ~= '1' and (home.clears or '0') == row.was_clears
end
