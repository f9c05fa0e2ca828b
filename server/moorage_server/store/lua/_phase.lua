-- What a living session does right now; the lengths of its tool gaps are summed per class.
local function set_phase(sid, row, phase)
  local key = P .. 's:' .. sid
  if phase == 'TOOL_WAIT' and row.phase ~= 'TOOL_WAIT' then
    call('HSET', key, 'gap_at', now)
  elseif phase == 'RUNNING' and row.phase == 'TOOL_WAIT' then
    call('HINCRBY', CLASSES, 'gapn:' .. row.class, 1)
    call('HINCRBY', CLASSES, 'gap:' .. row.class, text(math.max(0, now - tonumber(row.gap_at or now))))
  end
  call('HSET', key, 'phase', phase)
end
