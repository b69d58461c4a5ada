#!lua flags=allow-oom
-- Note that a model's client is done with it: its owner may release the model once no Op waits, until a new Op arrives.
-- ARGV: model id.
local key = 'tinsmith:models:' .. ARGV[1]
if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'unloaded', now_ms()) end
return 0
