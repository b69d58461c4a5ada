-- The Op at a seq, about to run: one more attempt. ARGV: model id, epoch, seq, worker.
-- Returns {kind, payload, doomed, attempts, ms since admission}, {} when it has not come, or 0 for a stale epoch.
local model = ARGV[1]
if redis.call('HGET', 'tinsmith:models:' .. model, 'epoch') ~= ARGV[2] then return 0 end
local op = 'tinsmith:op:' .. model .. ':' .. ARGV[3]
if redis.call('EXISTS', op) == 0 then return {} end
local attempts = redis.call('HINCRBY', op, 'attempts', 1)
redis.call('HSET', op, 'runner', ARGV[4])
local found = redis.call('HMGET', op, 'kind', 'payload', 'doomed', 'admitted')
local time = redis.call('TIME')
return {found[1], found[2], found[3] or '', attempts, time[1] * 1000 + math.floor(time[2] / 1000) - found[4]}
