-- Moves what is counted by class from one class to another. Needs _ledger and _queue.

-- Moves an amount between two counters. After a clock jump a session may have more time than its class: none of that
-- takes a counter below zero.
local function shift(name, from, to, amount)
  amount = math.min(amount, tonumber(call('HGET', CLASSES, name .. ':' .. from) or 0))
  if amount <= 0 then return end
  call('HINCRBY', CLASSES, name .. ':' .. from, text(0 - amount))
  call('HINCRBY', CLASSES, name .. ':' .. to, text(amount))
end

local function move_blocks(sid, row, from, to)
  -- Settled up to now under the old class.
  set_blocks(sid, from, row.inst, tonumber(row.blocks))
  accrue_class(from)
  accrue_class(to)
  shift('act', from, to, 1)
  shift('blk', from, to, tonumber(row.blocks))
  call('HINCRBY', P .. 'i:' .. row.inst, 'c:' .. from, -1)
  call('HINCRBY', P .. 'i:' .. row.inst, 'c:' .. to, 1)
  local lines, group = P .. 'g:' .. row.inst, row.group or ''
  -- A shared prefix stays with the class of its first session, unless nobody else holds it.
  if group ~= '' and call('HGET', lines, 'n:' .. group) == '1' and call('HGET', lines, 'k:' .. group) == from then
    call('HSET', lines, 'k:' .. group, to)
    shift('blk', from, to, tonumber(call('HGET', lines, 'b:' .. group)))
  end
end

-- What the session has cost so far was the new class's cost, and the turn it took was the new class's turn.
local function move_past(key, from, to, step_from, step_to)
  local cost = fields(key, 'z', 'd', 'home_at', 'gap', 'gapn', 'st')
  local here = cost.st == 'live' and math.max(0, now - tonumber(cost.home_at or now)) or 0
  shift('z', from, to, tonumber(cost.z or 0))
  shift('d', from, to, tonumber(cost.d or 0) + here)
  shift('gap', from, to, tonumber(cost.gap or 0))
  shift('gapn', from, to, tonumber(cost.gapn or 0))
  shift('adm', from, to, 1)
  call('HINCRBY', CLASSES, 'rl:' .. from, 1)
  call('HINCRBY', CLASSES, 'rl:' .. to, 1)
  local paid = tonumber(call('HGET', CLASSES, 'vt:' .. from) or 0)
  call('HSET', CLASSES, 'vt:' .. from, text(math.max(0, paid - step_from)))
  call('HINCRBY', CLASSES, 'vt:' .. to, text(step_to))
end

-- Takes its rank along; a class that nobody waited in is owed no more than its credit.
local function move_place(sid, from, to, credit)
  local rank, place = call('ZSCORE', P .. 'q:' .. from, sid), call('ZSCORE', P .. 'held', sid)
  dequeue(sid, from)
  if place then call('ZADD', P .. 'held', place, sid) end
  local row = fields(CLASSES, 'vt:' .. to, 'held:' .. to)
  if tonumber(row['held:' .. to] or 0) == 0 then
    local least = tonumber(call('HGET', POOL, 'gvt') or 0) - credit
    call('HSET', CLASSES, 'vt:' .. to, text(math.max(tonumber(row['vt:' .. to] or 0), least)))
  end
  enqueue(sid, to, rank)
end
