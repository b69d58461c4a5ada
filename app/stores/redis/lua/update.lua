#!lua flags=allow-oom
-- Set fields of an existing record. ARGV: namespace, id, field, value, ... Returns 1, or 0 when it does not exist.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('EXISTS', key) == 0 then return 0 end
redis.call('HSET', key, unpack(ARGV, 3))
return 1
