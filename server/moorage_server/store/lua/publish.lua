-- Publishes what the controller found: needs and limits per instance, estimates per class, and its own state.
-- include: _base _events _vector
--
-- ARGV  2 owner  3 policy ('' = unchanged)  4 state ('' = unchanged)  5 1 = an epoch ended
--       6 number of instances, then for each: instance, incarnation, asks added when it was read, computed need (both
--       comma-separated), number n of further fields, then n pairs of name and value
-- Returns 'OK' | 'FENCED'
if call('GET', P .. 'tick') ~= ARGV[2] then return 'FENCED' end
if ARGV[3] ~= '' then call('SET', P .. 'policy', ARGV[3]) end
if ARGV[4] ~= '' then call('SET', P .. 'state', ARGV[4]) end
if ARGV[5] == '1' then call('HINCRBY', POOL, 'epochs', 1) end

local at = 7
for _ = 1, tonumber(ARGV[6]) do
  local key, n = P .. 'i:' .. ARGV[at], tonumber(ARGV[at + 4])
  local row = fields(key, 'inc', 'added', 'backlog')
  if row.inc == ARGV[at + 1] then
    -- Admissions since the instance was read are not in the computed need: they stay on top of it.
    local added, read, need = numbers(row.added), numbers(ARGV[at + 2]), numbers(ARGV[at + 3])
    for i = 1, #need do need[i] = text(need[i] + math.max(0, (added[i] or 0) - (read[i] or 0))) end
    call('HSET', key, 'need', table.concat(need, ','))
    for i = 0, n - 1 do
      local name, value = ARGV[at + 5 + 2 * i], ARGV[at + 6 + 2 * i]
      if name == 'drained' then
        -- What was prefilled since the last epoch; admissions in between stay in the backlog.
        name, value = 'backlog', text(math.max(0, tonumber(row.backlog or 0) - tonumber(value)))
      end
      call('HSET', key, name, value)
    end
  end
  at = at + 5 + 2 * n
end
wake('published')
return 'OK'
