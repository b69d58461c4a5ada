#!lua flags=allow-oom
-- Commit an Op: seq becomes the applied seq, and its result can be read. ARGV: model id, epoch, seq, state, type, body,
-- seconds to keep, JSON list of {namespace, id, {field = value}} to record in the same step, reason of a failure, JSON
-- of its usage. Returns 1, or 0 when fenced.
local model, seq = ARGV[1], tonumber(ARGV[3])
local key = 'tinsmith:models:' .. model
local head = redis.call('HMGET', key, 'epoch', 'applied', 'owner')
if head[1] ~= ARGV[2] or tonumber(head[2]) ~= seq - 1 then return 0 end
local request = model .. ':' .. ARGV[3]
local kind = redis.call('HGET', 'tinsmith:op:' .. request, 'kind')
if not kind then return 0 end  -- nothing was admitted there
redis.call('HSET', key, 'applied', seq)
if ARGV[4] == 'failed' or kind == 'forward' or kind == 'save_weights' then
  drop_payload(request)  -- no replay runs it
end
if ARGV[4] == 'failed' then
  -- A failed Op left the model as it was, so a replay must not run it.
  redis.call('HSETNX', 'tinsmith:op:' .. request, 'doomed', ARGV[9])
  if kind == 'forward_backward' then doom(model, seq, ARGV[9]) end
  if kind == 'create_model' then redis.call('HSET', key, 'state', '"failed"') end
end
local future = 'tinsmith:future:' .. request
if redis.call('HEXISTS', future, 'state') == 1 then
  redis.call('HSET', future, 'state', ARGV[4], 'type', ARGV[5], 'body', ARGV[6], 'ended', now_ms())
end
redis.call('EXPIRE', future, ARGV[7])
for _, write in ipairs(cjson.decode(ARGV[8])) do
  change_record(write[1], write[2], function()
    for field, value in pairs(write[3]) do
      redis.call('HSET', 'tinsmith:' .. write[1] .. ':' .. write[2], field, value)
    end
    if write[3].owner then
      redis.call('HSET', 'tinsmith:' .. write[1] .. ':' .. write[2], 'owner', head[3])  -- it may have moved since
    end
  end)
  redis.call('ZADD', 'tinsmith:index:' .. write[1], 0, write[2])
end
if ARGV[4] == 'done' then count_usage(key, ARGV[10]) end
local later = redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. model, '(' .. seq, '+inf', 'LIMIT', 0, 1)
if #later == 0 then
  redis.call('ZREM', 'tinsmith:pending', model)
  redis.call('HDEL', 'tinsmith:pending_queue', model)
else
  redis.call('ZADD', 'tinsmith:pending', now_ms(), model)
end
redis.call('PUBLISH', 'tinsmith:done', request)
return 1
