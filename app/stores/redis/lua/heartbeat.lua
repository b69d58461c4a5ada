#!lua flags=allow-oom
-- A session's client says that it is there. ARGV: session id.
-- A session its client finished stays finished, but is kept for as long again.
local now = now_ms()
local status = redis.call('HGET', 'tinsmith:sessions:' .. ARGV[1], 'status')
if status ~= '"expired"' and redis.call('ZSCORE', 'tinsmith:sessions_ended', ARGV[1]) then
  redis.call('ZADD', 'tinsmith:sessions_ended', now, ARGV[1])
else
  hear(cjson.encode(ARGV[1]), now)
end
return 0
