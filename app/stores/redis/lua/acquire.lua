#!lua flags=allow-oom
-- Take the lease of a model. ARGV: model id, worker ("node/boot"), lease in ms.
-- Returns {epoch, applied, snapshot, snapshot_seq, epoch_floor}; {} for an unknown model; {holder} while another node
-- owns the model; {'ended', ''} for a model that has ended.
-- An older process of the same node is replaced at once: node names are unique, and the new epoch fences that process.
local key = 'tinsmith:models:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then return {} end
if redis.call('HEXISTS', key, 'ended') == 1 then return {'ended', ''} end
local held = redis.call('GET', 'tinsmith:lease:' .. ARGV[1])
if held and node_of(held) ~= node_of(ARGV[2]) then return {held} end
redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[2], 'PX', ARGV[3])
if redis.call('HGET', key, 'worker') ~= ARGV[2] then
  redis.call('HINCRBY', key, 'epoch', 1)
  redis.call('HSET', key, 'worker', ARGV[2])
end
local head = redis.call('HMGET', key, 'epoch', 'applied', 'snapshot', 'snapshot_seq', 'epoch_floor')
head[5] = head[5] or '0'
return head
