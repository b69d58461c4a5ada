-- Register a model with nothing applied. ARGV: model id, then field, value, ...
-- Returns 1, or 0 when it is there already.
local key = 'tinsmith:models:' .. ARGV[1]
if redis.call('EXISTS', key) == 1 then return 0 end
redis.call('HSET', key, 'applied', -1, 'epoch', 0, 'worker', '', 'snapshot', '', 'snapshot_seq', -1,
           unpack(ARGV, 2))
redis.call('SADD', 'tinsmith:index:models', ARGV[1])
return 1
