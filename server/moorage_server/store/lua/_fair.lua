-- Start-time fair queueing between classes: a class that waits is owed what it could not get so far, one that had no
-- demand may catch up by its credit at most.

-- The class's virtual time as its next session starts; `waits`: the session is in its queue.
local function virtual_start(class, waits, credit)
  local row = fields(CLASSES, 'vt:' .. class, 'held:' .. class)
  local virtual_time = tonumber(row['vt:' .. class] or 0)
  if waits or tonumber(row['held:' .. class] or 0) > 0 then return virtual_time end
  return math.max(virtual_time, tonumber(call('HGET', POOL, 'gvt') or 0) - credit)
end

-- Charges an admission to its class.
local function take_turn(class, waits, step, credit)
  local start = virtual_start(class, waits, credit)
  call('HSET', CLASSES, 'vt:' .. class, text(start + step))
  if start > tonumber(call('HGET', POOL, 'gvt') or 0) then call('HSET', POOL, 'gvt', text(start)) end
end
