#!lua flags=allow-oom
-- Note a heartbeat of a session's client. ARGV: session id.
-- A session that its client finished stays finished, but its time until removal starts again.
local now = now_ms()
local status = redis.call('HGET', 'tinsmith:sessions:' .. ARGV[1], 'status')
if status ~= '"expired"' and redis.call('ZSCORE', 'tinsmith:sessions_ended', ARGV[1]) then
  redis.call('ZADD', 'tinsmith:sessions_ended', now, ARGV[1])
else
  hear(cjson.encode(ARGV[1]), now)
end
return 0
