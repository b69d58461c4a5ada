#!lua flags=allow-oom
-- List the objects that nobody needs, also those of tries that never ended. ARGV: ms after which a try counts as dead,
-- most rows. Returns their keys.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', 'tinsmith:spilling', '-inf', now_ms() - ARGV[1])) do
  redis.call('ZREM', 'tinsmith:spilling', key)
  redis.call('SADD', 'tinsmith:spill_garbage', key)
end
return redis.call('SRANDMEMBER', 'tinsmith:spill_garbage', ARGV[2])
