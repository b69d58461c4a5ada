#!lua flags=allow-oom
-- Start on a sampling request. ARGV: request id, worker, lease in ms.
-- Returns {attempts, ms since admission}; {} when it is terminal, or 0 while another worker runs it.
local op = 'tinsmith:op:' .. ARGV[1]
if redis.call('EXISTS', op) == 0 then return {} end
if not redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[2], 'NX', 'PX', ARGV[3]) then return 0 end
return {redis.call('HINCRBY', op, 'attempts', 1), now_ms() - redis.call('HGET', op, 'admitted')}
