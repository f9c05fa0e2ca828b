-- Candidates of an admission, as the policy proposed them, and whether they still hold. Needs _vector.

-- The candidate at ARGV[at], and where the next one begins.
local function read_candidate(at)
  local facts = numbers(ARGV[at + 2])
  return { ikey = ARGV[at], inc = ARGV[at + 1], cap = facts[1], shared = facts[2], prefill = text(facts[3]),
    cached = text(facts[4]), asks = numbers(ARGV[at + 3]), limits = numbers(ARGV[at + 4]) }, at + 5
end

-- A comma-separated vector with the asks added; an empty one counts as zeros.
local function with_asks(vector, asks)
  local sums = numbers(vector)
  for i, value in ipairs(sums) do sums[i] = text(value + (asks[i] or 0)) end
  for i = #sums + 1, #asks do sums[i] = text(asks[i]) end
  return table.concat(sums, ',')
end

-- How long a failed session speaks against an instance of which nothing else is heard.
local SUSPECTED_MS = 3000

-- Why an instance in such a state takes nobody.
local CLOSED = { DRAINING = 'DRAINING', PAUSED = 'WEIGHT_UPDATE', SLEEPING = 'WEIGHT_UPDATE', STOPPED = 'NO_INSTANCE' }

-- Why the instance `row` can not take a session as candidate `c` any more, or nil. `unguarded`: whatever is booked.
local function refusal(c, row, unguarded)
  if row.inc ~= c.inc or row.gone == '1' then return 'NO_INSTANCE' end
  if unguarded then return nil end
  if row.cordon == '1' or row.drain == '1' then return 'DRAINING' end
  if row.upd == 'hold' then return 'WEIGHT_UPDATE' end
  local since_failure = now - tonumber(row.failed_at or 0)
  if since_failure >= 0 and since_failure < SUSPECTED_MS then return 'STALE_SNAPSHOT' end
  if CLOSED[row.state] then return CLOSED[row.state] end
  if tonumber(row.ses or 0) >= c.cap then return 'POOL_CAP' end
  local needs = numbers(row.need)
  for i, ask in ipairs(c.asks) do
    if (needs[i] or 0) + ask > c.limits[i] then return 'KV_BUDGET' end
  end
  return nil
end
