-- The ledger: blocks held, and their integral over time. Block-time is exact because it is accrued piecewise, right
-- before blocks or session counts change.

local function accrue_class(class)
  local at = tonumber(call('HGET', CLASSES, 'at:' .. class) or now)
  if now > at then
    local row = fields(CLASSES, 'blk:' .. class, 'act:' .. class)
    local blocks, active = tonumber(row['blk:' .. class] or 0), tonumber(row['act:' .. class] or 0)
    if blocks > 0 then call('HINCRBY', CLASSES, 'z:' .. class, text(blocks * (now - at))) end
    if active > 0 then call('HINCRBY', CLASSES, 'd:' .. class, text(active * (now - at))) end
  end
  call('HSET', CLASSES, 'at:' .. class, now)
end

-- Sets the blocks of a session's own part. The session is at home on `ikey`.
local function set_blocks(sid, class, ikey, blocks)
  local key = P .. 's:' .. sid
  local row = fields(key, 'blocks', 'at', 'peak')
  local old, at = tonumber(row.blocks or 0), tonumber(row.at or now)
  if now > at and old > 0 then call('HINCRBY', key, 'z', text(old * (now - at))) end
  call('HSET', key, 'blocks', blocks, 'at', now, 'peak', math.max(blocks, tonumber(row.peak or 0)))
  if blocks ~= old then
    accrue_class(class)
    call('HINCRBY', P .. 'i:' .. ikey, 'blocks', blocks - old)
    call('HINCRBY', CLASSES, 'blk:' .. class, blocks - old)
  end
end

-- Books the shared prefix of a group once per instance. Returns the blocks that this session need not book itself.
local function join_group(ikey, group, class, blocks)
  if group == '' then return 0 end
  local key = P .. 'g:' .. ikey
  if call('HINCRBY', key, 'n:' .. group, 1) == 1 then
    call('HSET', key, 'b:' .. group, blocks, 'k:' .. group, class)
    accrue_class(class)
    call('HINCRBY', P .. 'i:' .. ikey, 'blocks', blocks)
    call('HINCRBY', P .. 'i:' .. ikey, 'shared', blocks)
    call('HINCRBY', CLASSES, 'blk:' .. class, blocks)
    return blocks
  end
  return math.min(blocks, tonumber(call('HGET', key, 'b:' .. group)))
end

local function leave_group(ikey, group)
  if group == '' then return end
  local key = P .. 'g:' .. ikey
  if call('HINCRBY', key, 'n:' .. group, -1) > 0 then return end
  local row = fields(key, 'b:' .. group, 'k:' .. group)
  local blocks, class = tonumber(row['b:' .. group]), row['k:' .. group]
  call('HDEL', key, 'n:' .. group, 'b:' .. group, 'k:' .. group)
  accrue_class(class)
  call('HINCRBY', P .. 'i:' .. ikey, 'blocks', 0 - blocks)
  call('HINCRBY', P .. 'i:' .. ikey, 'shared', 0 - blocks)
  call('HINCRBY', CLASSES, 'blk:' .. class, 0 - blocks)
end

-- Blocks of the part of `tokens` that a session holds alone.
local function own_blocks(tokens, block_size, shared)
  return math.max(1, math.ceil(tokens / block_size) - shared)
end

-- Brings a session to its home: the counters move; its blocks follow with set_blocks.
local function move_in(sid, class, ikey)
  accrue_class(class)
  call('HINCRBY', CLASSES, 'act:' .. class, 1)
  call('HINCRBY', P .. 'i:' .. ikey, 'ses', 1)
  call('HINCRBY', P .. 'i:' .. ikey, 'c:' .. class, 1)
  call('SADD', P .. 'home:' .. ikey, sid)
  call('HSET', P .. 's:' .. sid, 'home_at', now)
end

-- Takes a living session off its home: its blocks are free, its counters move, its block-time is settled.
local function leave_home(sid, row)
  set_blocks(sid, row.class, row.inst, 0)
  local came = tonumber(call('HGET', P .. 's:' .. sid, 'home_at') or now)
  if now > came then call('HINCRBY', P .. 's:' .. sid, 'd', text(now - came)) end
  leave_group(row.inst, row.group or '')
  accrue_class(row.class)
  call('HINCRBY', CLASSES, 'act:' .. row.class, -1)
  call('HINCRBY', P .. 'i:' .. row.inst, 'ses', -1)
  call('HINCRBY', P .. 'i:' .. row.inst, 'c:' .. row.class, -1)
  call('SREM', P .. 'home:' .. row.inst, sid)
end
