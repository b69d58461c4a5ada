#!lua flags=allow-oom
-- A model's client is done with it: whoever holds it may let go of it once nothing waits, until an Op comes.
-- ARGV: model id.
local key = 'tinsmith:models:' .. ARGV[1]
if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'unloaded', now_ms()) end
return 0
