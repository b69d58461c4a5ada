-- The Op at a seq, about to run: one more attempt. ARGV: model id, epoch, seq, worker.
-- Returns {kind, doomed, attempts, ms since admission}, {} when it has not come, or 0 for a stale epoch.
local model = ARGV[1]
if redis.call('HGET', 'tinsmith:models:' .. model, 'epoch') ~= ARGV[2] then return 0 end
local op = 'tinsmith:op:' .. model .. ':' .. ARGV[3]
if redis.call('EXISTS', op) == 0 then return {} end
local attempts = redis.call('HINCRBY', op, 'attempts', 1)
redis.call('HSET', op, 'runner', ARGV[4])
local found = redis.call('HMGET', op, 'kind', 'doomed', 'admitted')
return {found[1], found[2] or '', attempts, now_ms() - found[3]}
