#!lua flags=allow-oom
-- Note that a live worker no longer runs the Op at a seq, also when another worker owns the model by now. ARGV: model
-- id, epoch, seq, worker, attempts to add. The attempts are not added when the epoch is stale.
local op = 'tinsmith:op:' .. ARGV[1] .. ':' .. ARGV[3]
if redis.call('EXISTS', op) == 1 then
  leave(op, ARGV[4])
  if redis.call('HGET', 'tinsmith:models:' .. ARGV[1], 'epoch') == ARGV[2] then
    redis.call('HINCRBY', op, 'attempts', ARGV[5])
  end
end
return 0
