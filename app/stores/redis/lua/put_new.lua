-- Set a record unless it is there. ARGV: namespace, id, field, value, ... Returns 1, or 0 when it is there.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('EXISTS', key) == 1 then return 0 end
local refusal = no_room(0)
if refusal then return refusal end
redis.call('HSET', key, unpack(ARGV, 3))
redis.call('ZADD', 'tinsmith:index:' .. ARGV[1], 0, ARGV[2])
return 1
