-- Journal an Op and its pending future, once. ARGV: model id, seq, request id, kind, payload, digest,
-- key the payload was staged under (or '')
-- Returns {what, lease holder}: fresh | repeat | conflict | refused (with its reason) | consumed | unknown
local model, seq, request = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'applied', 'owner', 'base_model')
if not head[1] then return {'unknown', ''} end
local holder = redis.call('GET', 'tinsmith:lease:' .. model) or ''
local known = redis.call('HMGET', 'tinsmith:future:' .. request, 'digest', 'refused')
if known[2] then return {'refused', known[2]} end
if known[1] then return {known[1] == ARGV[6] and 'repeat' or 'conflict', holder} end
if seq <= tonumber(head[1]) then return {'consumed', ''} end
local now = now_ms()
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', ARGV[4], 'attempts', 0, 'admitted', now)
if ARGV[7] == '' then
  redis.call('SET', 'tinsmith:payload:' .. request, ARGV[5])
else
  redis.call('RENAME', ARGV[7], 'tinsmith:payload:' .. request)
  redis.call('PERSIST', 'tinsmith:payload:' .. request)
end
redis.call('HSET', 'tinsmith:future:' .. request, 'kind', ARGV[4], 'model', model,
           'owner', cjson.decode(head[2]), 'digest', ARGV[6], 'state', 'pending')
redis.call('ZADD', 'tinsmith:journal:' .. model, seq, seq)
redis.call('HSET', 'tinsmith:models:' .. model, 'last_request', now)
redis.call('ZADD', 'tinsmith:pending', 'NX', now, model)
redis.call('HSET', 'tinsmith:pending_queue', model, 'train.' .. cjson.decode(head[3]))
return {'fresh', holder}
