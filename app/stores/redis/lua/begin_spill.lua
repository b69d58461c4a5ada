#!lua flags=allow-oom
-- Note the object a payload is about to be written to. ARGV: its key.
return redis.call('ZADD', 'tinsmith:spilling', now_ms(), ARGV[1])
