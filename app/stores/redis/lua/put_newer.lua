#!lua flags=allow-oom
-- Set a record whose version is above the stored version. ARGV: namespace, id, version, field, value, ...
-- Returns 1, or 0 when that version or a later one is stored.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if tonumber(redis.call('HGET', key, 'version') or 0) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', key, unpack(ARGV, 4))
redis.call('ZADD', 'tinsmith:index:' .. ARGV[1], 0, ARGV[2])
return 1
