#!lua flags=allow-oom
-- Set a record. ARGV: namespace, id, ms to live or 0, field, value, ... Returns 1.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
change_record(ARGV[1], ARGV[2], function() redis.call('HSET', key, unpack(ARGV, 4)) end)
if ARGV[3] ~= '0' then redis.call('PEXPIRE', key, ARGV[3]) end
redis.call('ZADD', 'tinsmith:index:' .. ARGV[1], 0, ARGV[2])
return 1
