-- Set a record unless it exists. ARGV: namespace, id, field, value, ... Returns 1, or 0 when it exists.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('EXISTS', key) == 1 then return 0 end
local refusal = no_room(0)
if refusal then return refusal end
change_record(ARGV[1], ARGV[2], function() redis.call('HSET', key, unpack(ARGV, 3)) end)
redis.call('ZADD', 'tinsmith:index:' .. ARGV[1], 0, ARGV[2])
return 1
