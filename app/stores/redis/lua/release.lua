-- Give up a lease if this worker holds it. ARGV: id, worker.
local key = 'tinsmith:lease:' .. ARGV[1]
if redis.call('GET', key) == ARGV[2] then redis.call('DEL', key) end
return 0
