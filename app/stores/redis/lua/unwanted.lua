#!lua flags=allow-oom
-- List the models that nobody needs in memory: ended models, and models without waiting Ops that are unloaded or whose
-- session has ended. ARGV: model ids.
local found = {}
for _, model in ipairs(ARGV) do
  local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'session_id', 'ended', 'unloaded', 'last_request')
  local unloaded = head[3] and tonumber(head[4] or 0) <= tonumber(head[3])
  local idle = head[1] and not redis.call('ZSCORE', 'tinsmith:pending', model)
                       and (unloaded or redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(head[1])))
  if not head[1] or head[2] or idle then found[#found + 1] = model end
end
return found
