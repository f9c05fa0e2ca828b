-- Notes what behaviour says of sessions, and moves those that change their class, with all that is counted by class.
-- include: _base _events _ledger _queue _class
--
-- ARGV  2 owner of the epoch  3 sessions that are over and proved mislabelled
--       4 number of sessions, then for each: session, class it is under, class to be under
--       ('' = as it is), inferred class, confidence, 1 = that contradicts the label, step of the old and of the new
--       class's virtual time, credit of the new one
-- Returns {'FENCED'} | {'OK', 1 if it changed its class, else 0, for each session}
if call('GET', P .. 'tick') ~= ARGV[2] then return { 'FENCED' } end

local function relabel(sid, key, row, to, confidence, at)
  local from = row.class
  if row.st == 'live' then move_blocks(sid, row, from, to) end
  if row.st == 'held' then move_place(sid, from, to, tonumber(ARGV[at + 8])) end
  if row.admitted and row.admitted ~= '' then
    move_past(key, from, to, tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7]))
  end
  call('HSET', key, 'class', to, 'byinf', 1)
  call('HINCRBY', key, 'moves', 1)
  if row.byinf ~= '1' then call('HINCRBY', POOL, 'inferred', 1) end
  touch(sid)
  emit('relabel', sid, row.inst or '', '', 'behaviour', 'from', from, 'to', to, 'confidence', confidence)
end

if tonumber(ARGV[3]) > 0 then call('HINCRBY', POOL, 'mislabelled', ARGV[3]) end
local answer, at = { 'OK' }, 5
for _ = 1, tonumber(ARGV[4]) do
  local sid, to = ARGV[at], ARGV[at + 2]
  local key = P .. 's:' .. sid
  local row = fields(key, 'st', 'class', 'inst', 'group', 'blocks', 'admitted', 'mis', 'byinf')
  local there = (row.st == 'live' or row.st == 'held') and row.class == ARGV[at + 1]
  if there then
    call('HSET', key, 'inf', ARGV[at + 3], 'conf', ARGV[at + 4])
    if ARGV[at + 5] == '1' and row.mis ~= '1' then
      call('HSET', key, 'mis', 1)
      call('HINCRBY', POOL, 'mislabelled', 1)
    end
  end
  local moves = there and to ~= '' and to ~= row.class
  if moves then relabel(sid, key, row, to, ARGV[at + 4], at) end
  answer[#answer + 1] = moves and 1 or 0
  at = at + 9
end
-- Whose turn it is may have changed.
wake('relabel')
return answer
