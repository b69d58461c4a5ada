-- Take in a sampling request, once. ARGV: request id, parent id, owner, queue, payload, digest.
-- Returns fresh | repeat | conflict
local request = ARGV[1]
local known = redis.call('HGET', 'tinsmith:future:' .. request, 'digest')
if known then return known == ARGV[6] and 'repeat' or 'conflict' end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', 'sample', 'payload', ARGV[5], 'attempts', 0, 'admitted', now)
redis.call('HSET', 'tinsmith:future:' .. request, 'kind', 'sample', 'model', ARGV[2], 'owner', ARGV[3],
           'digest', ARGV[6], 'state', 'pending')
redis.call('ZADD', 'tinsmith:pending', now, request)
redis.call('HSET', 'tinsmith:pending_queue', request, ARGV[4])
return 'fresh'
