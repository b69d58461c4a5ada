#!lua flags=allow-oom
-- End the sessions without a heartbeat or call for so long. ARGV: ms of silence, most sessions. Returns their ids.
local now = now_ms()
local silent = redis.call('ZRANGEBYSCORE', 'tinsmith:sessions_heard', '-inf', now - ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(silent) do
  redis.call('ZREM', 'tinsmith:sessions_heard', id)
  redis.call('ZADD', 'tinsmith:sessions_ended', 'NX', now, id)
  local key = 'tinsmith:sessions:' .. id
  if redis.call('HGET', key, 'status') == '"open"' then redis.call('HSET', key, 'status', '"expired"') end
end
return silent
