#!lua flags=allow-oom
-- Start the Op at a seq. ARGV: model id, epoch, seq, worker, lease in ms.
-- Returns {kind, doomed, attempts, ms since admission, 1 if an attempt is in doubt, the model's owner as JSON}, {} when
-- the Op has not arrived, or 0 for a stale epoch.
local model = ARGV[1]
if redis.call('HGET', 'tinsmith:models:' .. model, 'epoch') ~= ARGV[2] then return 0 end
local op = 'tinsmith:op:' .. model .. ':' .. ARGV[3]
if redis.call('EXISTS', op) == 0 then return {} end
local attempts, doubtful = begin(op, ARGV[4], ARGV[5])
local found = redis.call('HMGET', op, 'kind', 'doomed', 'admitted')
return {found[1], found[2] or '', attempts, now_ms() - found[3], doubtful,
        redis.call('HGET', 'tinsmith:models:' .. model, 'owner') or '""'}
