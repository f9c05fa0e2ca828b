-- Reads one page of sessions, or one session, with what is shown of them.
-- include: _base _queue
--
-- ARGV  2 'page' | 'one'  3 page: the last id of the page before ('' = first); one: the id  4 page: most ids to read
-- Returns {now, last id of the page ('' = no more), {sid, fields, position, ahead} ...}
local ids, next_id = { ARGV[3] }, ''
if ARGV[2] == 'page' then
  local from = ARGV[3] == '' and '-' or '(' .. ARGV[3]
  ids = call('ZRANGEBYLEX', P .. 'sessions', from, '+', 'LIMIT', 0, ARGV[4])
  if #ids == tonumber(ARGV[4]) then next_id = ids[#ids] end
end
local rows = {}
for _, sid in ipairs(ids) do
  local row = call('HGETALL', P .. 's:' .. sid)
  if #row > 0 then
    local held, position, ahead = fields(P .. 's:' .. sid, 'st', 'class'), 0, 0
    if held.st == 'held' then position, ahead = standing(sid, held.class) end
    rows[#rows + 1] = { sid, row, position, ahead }
  end
end
return { text(now), next_id, rows }
