#!lua flags=allow-oom
-- Remove a sampler's record. ARGV: sampler id, ms since which its session must have ended.
-- Returns 1, or 0 when the sampler does not exist, or when its session is open again.
local key = 'tinsmith:samplers:' .. ARGV[1]
local session = redis.call('HGET', key, 'session_id')
if not session or not is_retired(session, ARGV[2]) then return 0 end
redis.call('DEL', key)
redis.call('ZREM', 'tinsmith:index:samplers', ARGV[1])
return 1
