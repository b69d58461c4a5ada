#!lua flags=allow-oom
-- The Op at a seq, about to run. ARGV: model id, epoch, seq, worker.
-- An Op that was left running by another boot crashed it: one more attempt. One that was left in order has no runner.
-- Returns {kind, doomed, attempts, ms since admission}, {} when it has not come, or 0 for a stale epoch.
local model = ARGV[1]
if redis.call('HGET', 'tinsmith:models:' .. model, 'epoch') ~= ARGV[2] then return 0 end
local op = 'tinsmith:op:' .. model .. ':' .. ARGV[3]
if redis.call('EXISTS', op) == 0 then return {} end
local runner = redis.call('HGET', op, 'runner')
if runner and runner ~= ARGV[4] then redis.call('HINCRBY', op, 'attempts', 1) end
redis.call('HSET', op, 'runner', ARGV[4])
local found = redis.call('HMGET', op, 'kind', 'doomed', 'attempts', 'admitted')
return {found[1], found[2] or '', tonumber(found[3]), now_ms() - found[4]}
