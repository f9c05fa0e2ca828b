-- What an arrival's label is worth. `label` is a list: 'UNLABELLED' | 'UNKNOWN' | '', inferred class, confidence,
-- '1' = in force by inference, '1' = it contradicts the label, room for names that no configuration knows (-1 = this
-- one needs none), class of those that find no room. Needs _events.

-- The class in force: a caller that makes names up must not grow the table of classes for ever.
local function bounded(class, label)
  if label[6] < 0 or call('SISMEMBER', P .. 'names', class) == 1 then return class end
  if call('SCARD', P .. 'names') >= label[6] then
    label[1] = 'UNKNOWN'
    return label[7]
  end
  call('SADD', P .. 'names', class)
  return class
end

-- Keeps what is thought of the label. `first`: the session asks for the first time.
local function note_label(sid, class, declared, label, first)
  call('HSET', P .. 's:' .. sid, 'inf', label[2], 'conf', label[3], 'byinf', label[4], 'mis', label[5], 'moves', 0)
  if not first then return end
  if label[1] ~= '' then call('HINCRBY', POOL, label[1] == 'UNKNOWN' and 'unknown' or 'unlabelled', 1) end
  if label[1] == 'UNKNOWN' then
    emit('label', sid, '', '', 'declared class is unknown', 'declared', declared, 'class', class)
  end
  if label[5] == '1' then call('HINCRBY', POOL, 'mislabelled', 1) end
  if label[4] == '1' then
    call('HINCRBY', POOL, 'inferred', 1)
    emit('relabel', sid, '', '', 'hints', 'from', declared, 'to', class, 'confidence', label[3])
  end
end
