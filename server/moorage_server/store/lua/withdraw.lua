-- Takes back what a call brought about whose caller is gone, unless another call asked for the session since.
-- include: _base _events _ledger _queue _end
--
-- ARGV  2 request id ('' = none)  3 session  4 ticket of the call
-- Returns 1 if it was taken back, else 0
local sid = ARGV[3]
local row = fields(P .. 's:' .. sid, 'st', 'class', 'inst', 'group', 'admitted', 'ctx', 'homeless', 'ticket')
-- A session that lost its home was there before the call: it stays.
if ARGV[4] == '' or row.ticket ~= ARGV[4] or row.st == 'paused' or row.homeless == '1' then return 0 end
finish(sid, row, 'ABORTED', 'withdraw', 'its caller is gone')
-- Nobody heard the answer: the next try of the same request is its first.
if ARGV[2] ~= '' then call('DEL', P .. 'r:' .. ARGV[2]) end
return 1
