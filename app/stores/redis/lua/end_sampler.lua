#!lua flags=allow-oom
-- Remove a sampler's record. ARGV: sampler id, ms that its session must have ended ago.
-- Returns 1, or 0 when there is no such sampler, or its session lives again.
local key = 'tinsmith:samplers:' .. ARGV[1]
local session = redis.call('HGET', key, 'session_id')
if not session or not is_retired(session, ARGV[2]) then return 0 end
redis.call('DEL', key)
redis.call('ZREM', 'tinsmith:index:samplers', ARGV[1])
return 1
