#!lua flags=allow-oom
-- Remove the record of a session that has nothing left. ARGV: session id, ms since which it must have ended.
-- Returns 1, or 0 when the session is open again.
if not is_retired(cjson.encode(ARGV[1]), ARGV[2]) then return 0 end
redis.call('ZREM', 'tinsmith:sessions_ended', ARGV[1])
redis.call('DEL', 'tinsmith:sessions:' .. ARGV[1])
redis.call('ZREM', 'tinsmith:index:sessions', ARGV[1])
return 1
