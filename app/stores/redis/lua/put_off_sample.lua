#!lua flags=allow-oom
-- Requeue a sampling request that a live worker cannot run now. It costs no attempt. If that worker held its lease, any
-- worker may take it. For a request that was cancelled while the worker ran it, the unused tokens are refunded.
-- ARGV: request id, worker, tokens it used.
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
