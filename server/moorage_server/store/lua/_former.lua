-- Where a session was at home before it was paused.

-- Whether what the session left in the cache there may be there still: the same incarnation, not cleared since.
local function cache_kept(row)
  local home = fields(P .. 'i:' .. row.was, 'inc', 'cgen', 'gone')
  return home.inc == row.was_inc and home.gone ~= '1' and (home.cgen or '0') == row.was_gen
end
