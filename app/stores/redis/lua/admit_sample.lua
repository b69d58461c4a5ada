-- Take in a sampling request, once, and with it the version of the adapter it is to have.
-- ARGV: request id, parent id, owner, queue, payload, digest. Returns fresh | repeat | conflict
local request = ARGV[1]
local known = redis.call('HGET', 'tinsmith:future:' .. request, 'digest')
if known then return known == ARGV[6] and 'repeat' or 'conflict' end
local refusal = no_room(#ARGV[5])
if refusal then return refusal end
local now = now_ms()
hear(redis.call('HGET', 'tinsmith:samplers:' .. ARGV[2], 'session_id'), now)
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', 'sample', 'attempts', 0, 'admitted', now,
           'adapter', adapter_of(ARGV[2]))
redis.call('SET', 'tinsmith:payload:' .. request, ARGV[5])
count_payload(request, #ARGV[5], now)
redis.call('HSET', 'tinsmith:future:' .. request, 'kind', 'sample', 'model', ARGV[2], 'owner', ARGV[3],
           'digest', ARGV[6], 'state', 'pending')
redis.call('ZADD', 'tinsmith:pending', now, request)
redis.call('HSET', 'tinsmith:pending_queue', request, ARGV[4])
return 'fresh'
