#!lua flags=allow-oom
-- Replace a payload by the object that holds it. ARGV: request id, object key, when the Op was admitted.
-- Returns 1; 0 when the object was given up meanwhile, or became garbage because the payload is gone.
if redis.call('ZREM', 'tinsmith:spilling', ARGV[2]) == 0 then return 0 end
local op = 'tinsmith:op:' .. ARGV[1]
local is_there = redis.call('EXISTS', 'tinsmith:payload:' .. ARGV[1]) == 1
if not is_there or redis.call('HGET', op, 'admitted') ~= ARGV[3] then
  redis.call('SADD', 'tinsmith:spill_garbage', ARGV[2])
  return 0
end
drop_payload(ARGV[1])
redis.call('HSET', op, 'spilled', ARGV[2])
return 1
