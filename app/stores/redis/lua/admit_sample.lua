-- Take in a sampling request, once, and with it the version of the adapter it is to have.
-- ARGV: request id, parent id, owner, queue, payload, digest, tokens it may take, most requests and most tokens that may
-- be unfinished in its queue (or '' for any).
-- Returns {what, tokens or requests that are unfinished there}: fresh | repeat | conflict | too_large | requests | tokens
local request, sampler, queue, tokens = ARGV[1], ARGV[2], ARGV[4], tonumber(ARGV[7])
local known = redis.call('HGET', 'tinsmith:future:' .. request, 'digest')
if known then return {known == ARGV[6] and 'repeat' or 'conflict', 0} end
if ARGV[8] ~= '' then
  if tokens > tonumber(ARGV[9]) then return {'too_large', 0} end
  local requests = redis.call('HLEN', 'tinsmith:sampling:' .. queue)
  if requests >= tonumber(ARGV[8]) then return {'requests', requests} end
  local held = tonumber(redis.call('HGET', 'tinsmith:sampling_tokens', queue) or 0)
  if held + tokens > tonumber(ARGV[9]) then return {'tokens', held} end
end
local refusal = no_room(#ARGV[5])
if refusal then return refusal end
local now = now_ms()
hear(redis.call('HGET', 'tinsmith:samplers:' .. sampler, 'session_id'), now)
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', 'sample', 'attempts', 0, 'admitted', now,
           'adapter', adapter_of(sampler))
redis.call('SET', 'tinsmith:payload:' .. request, ARGV[5])
count_payload(request, #ARGV[5], now)
redis.call('HSET', 'tinsmith:future:' .. request, 'kind', 'sample', 'model', sampler, 'owner', ARGV[3],
           'digest', ARGV[6], 'state', 'pending')
redis.call('ZADD', 'tinsmith:pending', now, request)
redis.call('HSET', 'tinsmith:pending_queue', request, queue)
redis.call('HSET', 'tinsmith:sampling:' .. queue, request, tokens)
redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, tokens)
redis.call('SADD', 'tinsmith:sampled:' .. sampler, request)
redis.call('SADD', 'tinsmith:samplers_asked', sampler)
return {'fresh', 0}
