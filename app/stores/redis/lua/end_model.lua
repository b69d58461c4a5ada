#!lua flags=allow-oom
-- End a model for good: its owner is fenced, its journal and snapshot pointer are deleted, and its waiting calls fail.
-- ARGV: model id, seconds to keep results, type and body of a waiting future's result,
-- ms since which its session must have ended (or '' to end the model in any case).
-- Returns {base model, lease holder or '', 'true' for full fine-tuning}; {} when the model does not exist, or when its
-- session is open again.
local model = ARGV[1]
local key = 'tinsmith:models:' .. model
local head = redis.call('HMGET', key, 'applied', 'base_model', 'session_id', 'ended', 'full')
if not head[1] then return {} end
if ARGV[5] ~= '' and not is_retired(head[3], ARGV[5]) then return {} end

local function fail(request)
  local future = 'tinsmith:future:' .. request
  if redis.call('HGET', future, 'state') == 'pending' then
    redis.call('HSET', future, 'state', 'failed', 'type', ARGV[3], 'body', ARGV[4], 'ended', now_ms())
    redis.call('PUBLISH', 'tinsmith:done', request)
  end
  redis.call('EXPIRE', future, ARGV[2], 'NX')  -- those of consumed seqs have no end yet either
end

local holder = redis.call('GET', 'tinsmith:lease:' .. model) or ''
if not head[4] then
  list_run(model, 'SREM')
  redis.call('HINCRBY', key, 'epoch', 1)
  redis.call('HSET', key, 'ended', 'deleted', 'worker', '', 'snapshot', '')
  local journal = 'tinsmith:journal:' .. model
  for _, seq in ipairs(redis.call('ZRANGE', journal, 0, -1)) do
    local request = model .. ':' .. seq
    fail(request)
    drop_payload(request)
    redis.call('DEL', 'tinsmith:op:' .. request)
  end
  for _, prefix in ipairs(handed_over(model)) do
    redis.call('DEL', 'tinsmith:handovers:' .. prefix)
    redis.call('ZREM', 'tinsmith:index:handovers', prefix)
  end
  redis.call('DEL', journal, 'tinsmith:lease:' .. model)
  redis.call('ZREM', 'tinsmith:pending', model)
  redis.call('HDEL', 'tinsmith:pending_queue', model)
end
return {cjson.decode(head[2]), holder, head[5] or 'false'}
