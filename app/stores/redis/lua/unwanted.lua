#!lua flags=allow-oom
-- Which models nobody needs in memory: ended, or of a session that has, with nothing waiting. ARGV: model ids.
local found = {}
for _, model in ipairs(ARGV) do
  local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'session_id', 'ended')
  local idle = head[1] and not redis.call('ZSCORE', 'tinsmith:pending', model)
                       and redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(head[1]))
  if not head[1] or head[2] or idle then found[#found + 1] = model end
end
return found
