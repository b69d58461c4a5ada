-- Journal a sampling request, once, with the adapter version that it uses and the node that it is dispatched to.
-- ARGV: request id, parent id, owner, queue, payload, digest, tokens it may take, its sequences, most requests and most
-- tokens that may be unfinished in its queue (or '' for no bound), charge, the names of its payers.
-- Returns {'fresh', node to dispatch to, or '' for any node}, or {'held', ''} when the request is throttled. Else
-- returns {repeat | conflict | unknown | too_large | requests | tokens, unfinished requests or tokens in the queue}, or
-- {'limited', ...} as `over_limit` in limits.lua does.
local request, sampler, queue, tokens = ARGV[1], ARGV[2], ARGV[4], tonumber(ARGV[7])

local known = redis.call('HGET', 'tinsmith:future:' .. request, 'digest')
if known then return {known == ARGV[6] and 'repeat' or 'conflict', 0} end
local session = redis.call('HGET', 'tinsmith:samplers:' .. sampler, 'session_id')
if not session then return {'unknown', 0} end  -- it went since it was looked up, and nobody knows of which adapter it was
if ARGV[9] ~= '' then
  if tokens > tonumber(ARGV[10]) then return {'too_large', 0} end
  local requests = redis.call('HLEN', 'tinsmith:sampling:' .. queue)
  if requests >= tonumber(ARGV[9]) then return {'requests', requests} end
  local held = tonumber(redis.call('HGET', 'tinsmith:sampling_tokens', queue) or 0)
  if held + tokens > tonumber(ARGV[10]) then return {'tokens', held} end
end
local refusal = no_room(#ARGV[5])
if refusal then return refusal end
local limited = ARGV[11] ~= '' and take(cjson.decode(ARGV[11]))
if limited then return limited end
local now = now_ms()
hear(session, now)
local adapter = adapter_of(sampler)
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', 'sample', 'attempts', 0, 'admitted', now, 'adapter', adapter,
           'rows', ARGV[8], 'payers', ARGV[12])
count_samples(request, 1)
redis.call('SET', 'tinsmith:payload:' .. request, ARGV[5])
count_payload(request, #ARGV[5], now)
redis.call('HSET', 'tinsmith:future:' .. request, 'kind', 'sample', 'model', sampler, 'owner', ARGV[3],
           'digest', ARGV[6], 'state', 'pending', 'admitted', now)
redis.call('ZADD', 'tinsmith:pending', now, request)
redis.call('HSET', 'tinsmith:pending_queue', request, queue)
redis.call('HSET', 'tinsmith:sampling:' .. queue, request, tokens)
redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, tokens)
redis.call('SADD', 'tinsmith:sampled:' .. sampler, request)
redis.call('SADD', 'tinsmith:samplers_asked', sampler)
if redis.call('EXISTS', held_key(queue, ARGV[3])) == 1 or not may_ring(queue, ARGV[3], tonumber(ARGV[8])) then
  hold(request, queue, ARGV[3], now)
  return {'held', ''}
end
return {'fresh', ring(request, queue, ARGV[3])}
