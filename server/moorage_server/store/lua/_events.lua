-- Events and histories: what happened, for people. Bounded by count and by time.
local EVENTS_KEPT, HISTORY_KEPT, HISTORY_MS = 10000, 32, 86400000

local function emit(kind, sid, ikey, decision, reason, ...)
  call('XADD', P .. 'events', 'MAXLEN', '~', EVENTS_KEPT, '*', 'at', now, 'kind', kind, 'sid', sid, 'inst', ikey,
    'decision', decision, 'reason', reason, ...)
  if sid ~= '' then
    local history = P .. 'h:' .. sid
    call('RPUSH', history, cjson.encode({ text(now), kind, reason, ikey }))
    call('LTRIM', history, -HISTORY_KEPT, -1)
    call('PEXPIRE', history, HISTORY_MS)
  end
end

-- Tells every server process that the pool changed for those who wait, so that they look again.
local function wake(why)
  if call('SCARD', P .. 'queues') > 0 then call('PUBLISH', P .. 'wake', why) end
end
