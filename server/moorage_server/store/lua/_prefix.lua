-- What is known of an instance's prefix cache. The sorted set x:<instance> holds hashes of 8 bytes by the time of their
-- last store; the instance's own hash says where they come from (px_src 'events' | 'placed'), how far the events came
-- (px_stream, px_seq), when (px_at), whether they are to be relied on (px_behind) and how many there are (px_n).
local HASH_BYTES, SET_KEPT_MS = 8, 600000
-- Hashes that one call drops at most, so that no script runs long: more than one call adds.
local DROPPED = 4096

-- Forgets all that is known of an instance's cache: it was cleared, or is another one now.
local function forget_prefixes(ikey)
  call('UNLINK', P .. 'x:' .. ikey)
  call('HDEL', P .. 'i:' .. ikey, 'px_src', 'px_stream', 'px_seq', 'px_at', 'px_behind', 'px_n')
end

-- The hashes of a blob as a list.
local function split_hashes(blob)
  local list = {}
  for at = 1, #blob, HASH_BYTES do list[#list + 1] = string.sub(blob, at, at + HASH_BYTES - 1) end
  return list
end

-- Adds hashes of a prompt, the first of them at block `from`. Each counts as a sixteenth of a millisecond older than
-- the one before it: of what came at one time the deepest is dropped first, as it is nothing without the others.
local function add_hashes(ikey, hashes, from)
  if #hashes == 0 then return end
  local args = {}
  for i, hash in ipairs(hashes) do
    args[2 * i - 1] = string.format('%.4f', now - (from + i) / 16)
    args[2 * i] = hash
  end
  call('ZADD', P .. 'x:' .. ikey, unpack(args))
end

-- Drops the oldest above `most`, and notes what the index is now. Returns nothing.
local function settle_index(ikey, most, ...)
  local set = P .. 'x:' .. ikey
  local count = call('ZCARD', set)
  if count > most then
    count = count - call('ZREMRANGEBYRANK', set, 0, math.min(count - most, DROPPED) - 1)
  end
  call('PEXPIRE', set, SET_KEPT_MS)
  call('HSET', P .. 'i:' .. ikey, 'px_at', text(now), 'px_n', count, ...)
end
