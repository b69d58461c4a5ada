#!lua flags=allow-oom
-- A sampling request that a live worker cannot run now: free for anybody, at no attempt. ARGV: request id, worker.
local lease = 'tinsmith:lease:' .. ARGV[1]
if redis.call('GET', lease) == ARGV[2] then
  redis.call('HDEL', 'tinsmith:op:' .. ARGV[1], 'runner')
  place(ARGV[1], redis.call('HGET', 'tinsmith:pending_queue', ARGV[1]), '')
  redis.call('DEL', lease)
end
return 0
