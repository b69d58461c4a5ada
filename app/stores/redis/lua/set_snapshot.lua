#!lua flags=allow-oom
-- Point a model at a durable snapshot and trim the journal behind it. ARGV: model id, epoch, seq, reference.
-- Returns the replaced reference (its own for a repeat). Returns 0 while an adapter that is not in the object store yet
-- could only be made again from the Ops to trim. Returns false for a stale epoch or a snapshot that is not newer.
local key = 'tinsmith:models:' .. ARGV[1]
local head = redis.call('HMGET', key, 'epoch', 'snapshot_seq', 'snapshot', 'applied')
if head[1] == ARGV[2] and head[3] == ARGV[4] then return ARGV[4] end  -- a repeat, whose answer was lost
if head[1] ~= ARGV[2] or tonumber(ARGV[3]) <= tonumber(head[2]) or tonumber(ARGV[3]) > tonumber(head[4]) then
  return false
end
for _, prefix in ipairs(handed_over(ARGV[1])) do
  if tonumber(redis.call('HGET', 'tinsmith:handovers:' .. prefix, 'seq')) <= tonumber(ARGV[3]) then return 0 end
end
redis.call('HSET', key, 'snapshot', ARGV[4], 'snapshot_seq', ARGV[3])
local journal = 'tinsmith:journal:' .. ARGV[1]
for _, seq in ipairs(redis.call('ZRANGEBYSCORE', journal, '-inf', ARGV[3])) do
  local request = ARGV[1] .. ':' .. seq
  drop_payload(request)
  redis.call('DEL', 'tinsmith:op:' .. request)
end
redis.call('ZREMRANGEBYSCORE', journal, '-inf', ARGV[3])
return head[3]
