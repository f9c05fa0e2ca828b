-- Declares an instance gone: its sessions lose their home and wait ahead of new ones.
-- include: _base _events _ledger _queue _detach _grace _prefix
--
-- ARGV  2 instance  3 silence after which an instance is gone  4 silence after which it is forgotten
-- Returns {'ALIVE'} | {'GONE', sessions detached} | {'FORGOTTEN'}
local key = P .. 'i:' .. ARGV[2]
local row = fields(key, 'seen', 'state', 'gone', 'ses')
if not row.seen then return { 'FORGOTTEN' } end
local silent = now - tonumber(row.seen)
if row.state ~= 'STOPPED' and (silent < tonumber(ARGV[3]) or in_grace()) then return { 'ALIVE' } end
local members = call('SMEMBERS', P .. 'home:' .. ARGV[2])
for _, sid in ipairs(members) do
  detach(sid, fields(P .. 's:' .. sid, 'class', 'inst', 'group', 'rank'), 'home is gone')
end
if row.gone ~= '1' then
  call('HSET', key, 'gone', 1)
  emit('gone', '', ARGV[2], '', row.state == 'STOPPED' and 'stopped' or 'silent', 'sessions', #members)
  wake('gone')
end
if silent >= tonumber(ARGV[4]) then
  forget_prefixes(ARGV[2])
  call('SREM', P .. 'instances', ARGV[2])
  call('DEL', key, P .. 'g:' .. ARGV[2], P .. 'inc:' .. ARGV[2])
  return { 'FORGOTTEN' }
end
return { 'GONE', #members }
