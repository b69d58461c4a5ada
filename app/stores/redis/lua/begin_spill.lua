#!lua flags=allow-oom
-- Note the key of an object before a payload is written to it. ARGV: the key.
return redis.call('ZADD', 'tinsmith:spilling', now_ms(), ARGV[1])
