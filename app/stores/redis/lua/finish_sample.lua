#!lua flags=allow-oom
-- Make a sample's result readable; the first one stays. ARGV: request id, state, type, body, seconds to keep.
-- Returns 1, or 0 when there was a result already.
local future = 'tinsmith:future:' .. ARGV[1]
if redis.call('HGET', future, 'state') ~= 'pending' then return 0 end
redis.call('HSET', future, 'state', ARGV[2], 'type', ARGV[3], 'body', ARGV[4])
redis.call('EXPIRE', future, ARGV[5])
drop_payload(ARGV[1])
redis.call('DEL', 'tinsmith:op:' .. ARGV[1], 'tinsmith:lease:' .. ARGV[1])
redis.call('ZREM', 'tinsmith:pending', ARGV[1])
redis.call('HDEL', 'tinsmith:pending_queue', ARGV[1])
redis.call('PUBLISH', 'tinsmith:done', ARGV[1])
return 1
