#!lua flags=allow-oom
-- One more client of a sampling session. ARGV: sampler id. Returns its number, 1 for the first; 0 without such a session.
local key = 'tinsmith:samplers:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then return 0 end
return redis.call('HINCRBY', key, 'joined', 1)
