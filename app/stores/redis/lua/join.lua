#!lua flags=allow-oom
-- Add a client to a sampling session. ARGV: sampler id. Returns the client's number, from 1; 0 without such a session.
local key = 'tinsmith:samplers:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then return 0 end
return redis.call('HINCRBY', key, 'joined', 1)
