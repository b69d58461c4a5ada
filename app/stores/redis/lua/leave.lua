#!lua flags=allow-oom
-- The Op at a seq no longer runs, though its worker lives. ARGV: model id, epoch, seq, attempts to add.
-- Returns 1, or 0 for a stale epoch.
if redis.call('HGET', 'tinsmith:models:' .. ARGV[1], 'epoch') ~= ARGV[2] then return 0 end
local op = 'tinsmith:op:' .. ARGV[1] .. ':' .. ARGV[3]
if redis.call('EXISTS', op) == 1 then
  redis.call('HDEL', op, 'runner')
  redis.call('HINCRBY', op, 'attempts', ARGV[4])
end
return 1
