#!lua flags=allow-oom
-- Finish a session for its client; the first reason stays. ARGV: session id, reason as JSON.
local key = 'tinsmith:sessions:' .. ARGV[1]
local status = redis.call('HGET', key, 'status')
if status == '"open"' or status == '"expired"' then redis.call('HSET', key, 'status', ARGV[2]) end
redis.call('ZREM', 'tinsmith:sessions_heard', ARGV[1])
redis.call('ZADD', 'tinsmith:sessions_ended', 'NX', now_ms(), ARGV[1])
return 0
