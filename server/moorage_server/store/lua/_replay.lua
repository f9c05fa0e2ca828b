-- Answers by request id: a repeat gets the first final answer, a reuse with another body is refused.
local REMEMBER_MS = 600000

-- The final answer given before, 'REUSED' if the id came with another body, or nil.
local function replayed(rid, body)
  if rid == '' then return nil end
  local flat = call('HGETALL', P .. 'r:' .. rid)
  if #flat == 0 then return nil end
  local row, answer = {}, {}
  for i = 1, #flat, 2 do row[flat[i]] = flat[i + 1] end
  if row.body ~= body then return { 'REUSED' } end
  for i = 1, tonumber(row.n) do answer[i] = row[tostring(i)] end
  return answer[1] and answer
end

-- Keeps a final answer. Returns it.
local function remember(rid, body, answer)
  if rid == '' then return answer end
  local args = { 'body', body, 'n', #answer }
  for i, value in ipairs(answer) do
    args[#args + 1] = tostring(i)
    args[#args + 1] = value
  end
  call('HSET', P .. 'r:' .. rid, unpack(args))
  call('PEXPIRE', P .. 'r:' .. rid, REMEMBER_MS)
  return answer
end

-- Keeps only which request the id belongs to: its answer is not final, so the retry is evaluated anew.
local function claim(rid, body)
  remember(rid, body, {})
end
