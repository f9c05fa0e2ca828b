-- What a living session does right now; the lengths of its tool gaps are summed for itself and per class.
local function set_phase(sid, row, phase)
  local key = P .. 's:' .. sid
  if phase == 'TOOL_WAIT' and row.phase ~= 'TOOL_WAIT' then
    call('HSET', key, 'gap_at', now)
  elseif phase == 'RUNNING' and row.phase == 'TOOL_WAIT' then
    local gap = text(math.max(0, now - tonumber(row.gap_at or now)))
    call('HINCRBY', CLASSES, 'gapn:' .. row.class, 1)
    call('HINCRBY', CLASSES, 'gap:' .. row.class, gap)
    call('HINCRBY', key, 'gapn', 1)
    call('HINCRBY', key, 'gap', gap)
  end
  call('HSET', key, 'phase', phase)
end
