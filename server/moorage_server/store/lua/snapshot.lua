-- Takes one snapshot of an instance: registers it, drops repeats and older ones, turns the page at a new incarnation.
-- include: _base _events _ledger _queue _lease _detach _epoch _prefix
--
-- ARGV  2 instance key  3 incarnation  4 sequence (20 digits)  5 state  6 block size ('' = unknown)
--       7 block size to count with while none is known  8 the snapshot, serialised  9 age of what was observed
--       10 weight version ('' = unknown)  11 policy version that its name gives away ('' = none)
--       12 cache epoch ('' = unknown)
-- Returns {'OK', 1 if new} | {'OLD_SEQUENCE'} | {'OLD_INCARNATION'}
local ikey, inc, state = ARGV[2], ARGV[3], ARGV[5]
local key, gone_incs = P .. 'i:' .. ikey, P .. 'inc:' .. ikey
local row = fields(key, 'inc', 'seq', 'state', 'gone', 'bs', 'swv', 'wv', 'ce', 'failed_at')

if row.inc == inc and row.seq and ARGV[4] <= row.seq then return { 'OLD_SEQUENCE' } end
if row.inc ~= inc and call('SISMEMBER', gone_incs, inc) == 1 then return { 'OLD_INCARNATION' } end

local new = row.inc ~= inc
if new then
  if row.inc then
    -- Bookings never carry over to a new incarnation under the old name.
    for _, sid in ipairs(call('SMEMBERS', P .. 'home:' .. ikey)) do
      detach(sid, fields(P .. 's:' .. sid, 'class', 'inst', 'group', 'rank'), 'home restarted')
    end
    call('SADD', gone_incs, row.inc)
    call('PEXPIRE', gone_incs, 86400000)
    forget_prefixes(ikey)
    call('HDEL', key, 'need', 'added', 'budget', 'cap', 'caps', 'brake', 'pressure', 'backlog', 'hexp', 'hgot', 'drain',
      'swv', 'wv', 'pv', 'ce', 'ep', 'clears', 'stalled')
  end
  call('SADD', P .. 'instances', ikey)
  call('HSET', POOL, 'named', 1)
  call('HSET', key, 'inc', inc, 'born', now)
  -- Weights are loaded into all of the pool: into who comes meanwhile as well.
  local loading = fields(POOL, 'upd', 'upd_at', 'upd_v')
  if loading.upd then call('HSET', key, 'upd', loading.upd, 'upd_at', loading.upd_at, 'upd_v', loading.upd_v) end
  emit('register', '', ikey, '', row.inc and 'new incarnation' or 'new instance', 'incarnation', inc)
end
call('HSET', key, 'seq', ARGV[4], 'seen', text(now), 'state', state, 'snap', ARGV[8], 'age', ARGV[9], 'gone', 0)
-- What was observed before a session failed there does not speak for it.
if row.failed_at and now - tonumber(ARGV[9]) > tonumber(row.failed_at) then call('HDEL', key, 'failed_at') end
-- A block size that is not known yet must not move what is booked already.
if ARGV[6] ~= '' then call('HSET', key, 'bs', ARGV[6]) elseif not row.bs then call('HSET', key, 'bs', ARGV[7]) end

-- What the engine says of its weights and its cache, against what it said last: another answer is another epoch. The
-- end of an update may have told the version before the engine does.
if new then row = {} end
if ARGV[10] ~= '' and ARGV[10] ~= row.swv then
  local known, told = ARGV[10] == row.wv, fields(POOL, 'wv', 'pv', 'pv_told')
  call('HSET', key, 'swv', ARGV[10])
  if not known then
    -- A trainer that numbers its versions itself means those numbers, whatever the names look like.
    local version = told.pv_told and '' or ARGV[11]
    if told.wv == ARGV[10] and told.pv and told.pv ~= '' then version = told.pv end
    call('HSET', key, 'wv', ARGV[10], 'pv', version)
    if row.wv then new_epoch(ikey, false, 'the engine serves other weights', ARGV[10]) end
    wake('weights')
  end
end
if ARGV[12] ~= '' and ARGV[12] ~= row.ce then
  call('HSET', key, 'ce', ARGV[12])
  if row.ce then
    new_epoch(ikey, true, 'the engine cleared its cache', row.wv or '')
    forget_prefixes(ikey)
  end
end

if new or row.state ~= state or row.gone == '1' then
  call('HSET', key, 'state_at', text(now))
  if not new and STILL[row.state] and not STILL[state] then renew_home(ikey) end
  if not new then emit('state', '', ikey, '', state) end
  wake('instance')
end
return { 'OK', new and 1 or 0 }
