-- Takes back what a call brought about whose caller is gone, unless another call asked for the session since.
-- include: _base _events _ledger _queue _lease _end
--
-- ARGV  2 request id ('' = none)  3 session  4 ticket of the call  5 how long a paused session is remembered
-- Returns 1 if it was taken back, else 0
local sid = ARGV[3]
local row = fields(P .. 's:' .. sid, 'st', 'class', 'inst', 'group', 'admitted', 'ctx', 'homeless', 'ticket',
  'resumes')
-- A session that lost its home was there before the call: it stays.
if ARGV[4] == '' or row.ticket ~= ARGV[4] or row.st == 'paused' or row.homeless == '1' then return 0 end
if row.st == 'held' and row.resumes == '1' then
  -- It was paused before the call, and is again: its seniority is not the call's to lose.
  finish(sid, row, 'PAUSED', 'withdraw', 'its caller is gone')
  remember_paused(sid, tonumber(ARGV[5]))
else
  finish(sid, row, 'ABORTED', 'withdraw', 'its caller is gone')
end
-- Nobody heard the answer: the next try of the same request is its first.
if ARGV[2] ~= '' then call('DEL', P .. 'r:' .. ARGV[2]) end
return 1
