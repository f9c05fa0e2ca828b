-- Looks up how much of a prompt each instance holds.
-- include: _base _prefix
--
-- ARGV  2 hashes to look for, in order, 8 bytes each  3 and on: instances
-- Returns for each instance how many of the hashes, from the first on without a gap, it holds
local PER_CALL = 16
local hashes, answer = split_hashes(ARGV[2]), {}

local function leading(set)
  for from = 1, #hashes, PER_CALL do
    local scores = call('ZMSCORE', set, unpack(hashes, from, math.min(from + PER_CALL - 1, #hashes)))
    for i, score in ipairs(scores) do
      if not score then return from + i - 2 end
    end
  end
  return #hashes
end

for i = 3, #ARGV do answer[#answer + 1] = leading(P .. 'x:' .. ARGV[i]) end
return answer
