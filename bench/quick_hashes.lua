-- Hashes of the in-process store, kept in Lua: the scripts' calls on them need not leave it. Given the store's own `call`
-- and the time of the running script in milliseconds; returns a `call` that does the same. In a script's arguments keys
-- and fields are strings, values strings or numbers.
local slow, clock = ...

-- By key: `values` by field, `order` of the fields as they came, `ends` in ms or nil.
local hashes = {}

local function text(value)
  if type(value) == 'number' then return string.format('%.17g', value) end
  return value
end

local function found(key)
  local hash = hashes[key]
  if hash and hash.ends and hash.ends < clock.now then
    hashes[key] = nil
    return nil
  end
  return hash
end

local function set(hash, field, value)
  local is_new = hash.values[field] == nil
  if is_new then hash.order[#hash.order + 1] = field end
  hash.values[field] = value
  return is_new and 1 or 0
end

local function made(key)
  local hash = found(key)
  if not hash then
    hash = { values = {}, order = {} }
    hashes[key] = hash
  end
  return hash
end

local fast = {}

function fast.HGET(key, field)
  local hash = found(key)
  return hash and hash.values[text(field)] or false
end

function fast.HEXISTS(key, field)
  local hash = found(key)
  return hash and hash.values[text(field)] and 1 or 0
end

function fast.HMGET(key, ...)
  local hash, result = found(key), { ... }
  for n = 1, #result do
    result[n] = hash and hash.values[text(result[n])] or false
  end
  return result
end

function fast.HGETALL(key)
  local hash, result = found(key), {}
  for n, field in ipairs(hash and hash.order or {}) do
    result[2 * n - 1], result[2 * n] = field, hash.values[field]
  end
  return result
end

function fast.HSET(key, ...)
  local hash, pairs_given, added = made(key), { ... }, 0
  for n = 1, #pairs_given, 2 do
    added = added + set(hash, text(pairs_given[n]), text(pairs_given[n + 1]))
  end
  return added
end

function fast.HINCRBY(key, field, amount)
  local hash = made(key)
  local sum = tonumber(hash.values[text(field)] or 0) + tonumber(amount)
  set(hash, text(field), string.format('%.0f', sum))
  return sum
end

function fast.HDEL(key, ...)
  local hash, removed = found(key), 0
  if not hash then return 0 end
  for _, field in ipairs({ ... }) do
    if hash.values[text(field)] ~= nil then
      hash.values[text(field)] = nil
      removed = removed + 1
    end
  end
  local kept = {}
  for _, field in ipairs(hash.order) do
    if hash.values[field] ~= nil then kept[#kept + 1] = field end
  end
  hash.order = kept
  if #kept == 0 then hashes[key] = nil end
  return removed
end

function fast.PEXPIRE(key, ms)
  local hash = found(key)
  if not hash then return slow('PEXPIRE', key, ms) end
  hash.ends = clock.now + tonumber(ms)
  return 1
end

function fast.EXISTS(...)
  local count = 0
  for _, key in ipairs({ ... }) do
    count = count + (found(key) and 1 or slow('EXISTS', key))
  end
  return count
end

function fast.DEL(...)
  local removed = 0
  for _, key in ipairs({ ... }) do
    if found(key) then
      hashes[key] = nil
      removed = removed + 1
    else
      removed = removed + slow('DEL', key)
    end
  end
  return removed
end

fast.UNLINK = fast.DEL

function fast.TIME()
  local seconds = math.floor(clock.now / 1000)
  return { string.format('%.0f', seconds), string.format('%.0f', (clock.now - 1000 * seconds) * 1000) }
end

return function(command, ...)
  local quick = fast[command]
  if quick then return quick(...) end
  return slow(command, ...)
end
