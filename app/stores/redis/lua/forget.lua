#!lua flags=allow-oom
-- Remove the record of a session of which nothing is left. ARGV: session id, ms that it must have ended ago.
-- Returns 1, or 0 when it lives again.
if not is_retired(cjson.encode(ARGV[1]), ARGV[2]) then return 0 end
redis.call('ZREM', 'tinsmith:sessions_ended', ARGV[1])
redis.call('DEL', 'tinsmith:sessions:' .. ARGV[1])
redis.call('ZREM', 'tinsmith:index:sessions', ARGV[1])
return 1
