#!lua flags=allow-oom
-- Take or keep the lead in a role. ARGV: role, worker, lease in ms. Returns 1 while this worker leads, else 0.
local key = 'tinsmith:lease:' .. ARGV[1]
local holder = redis.call('GET', key)
if holder and holder ~= ARGV[2] then return 0 end
redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
return 1
