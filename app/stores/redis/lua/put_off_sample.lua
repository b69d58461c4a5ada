#!lua flags=allow-oom
-- A sampling request that a live worker cannot run now: at no attempt of his, and free for anybody if it was his.
-- One that was called off while he ran it is given back what it did not take. ARGV: request id, worker, tokens it took.
local op, lease = 'tinsmith:op:' .. ARGV[1], 'tinsmith:lease:' .. ARGV[1]
settle_stopped(ARGV[1], ARGV[2], ARGV[3])
leave(op, ARGV[2])
if redis.call('GET', lease) == ARGV[2] then
  local queue = redis.call('HGET', 'tinsmith:pending_queue', ARGV[1])
  place(ARGV[1], queue, '')
  leave_project(ARGV[1], queue)  -- what cannot run keeps nothing from being rung for
  redis.call('HSET', op, 'ring', 'off')
  redis.call('DEL', lease)
end
return 0
