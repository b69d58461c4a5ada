#!lua flags=allow-oom
-- Start a sampling request. ARGV: request id, worker ("node/boot"), lease in ms, most attempts or ''.
-- Returns {attempts, 1 if one attempt is in doubt, ms since admission, adapter or false}; {} when it is terminal, 0
-- while another worker runs it, or 1 when it had more than the most attempts.
local op = 'tinsmith:op:' .. ARGV[1]
if redis.call('EXISTS', op) == 0 then return {} end
if not redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[2], 'NX', 'PX', ARGV[3]) then return 0 end
local attempts, doubtful = begin(op, ARGV[2], ARGV[3])
if ARGV[4] ~= '' and attempts > tonumber(ARGV[4]) then
  leave(op, ARGV[2])
  redis.call('DEL', 'tinsmith:lease:' .. ARGV[1])
  return 1
end
local found = redis.call('HMGET', op, 'admitted', 'adapter', 'ring')
local node, queue = node_of(ARGV[2]), redis.call('HGET', 'tinsmith:pending_queue', ARGV[1])
if found[3] == 'off' then count_rung(ARGV[1], queue, redis.call('HGET', 'tinsmith:future:' .. ARGV[1], 'owner')) end
local before = place(ARGV[1], queue, node)
local key = home_of(ARGV[1], found[2])
-- Affinity moves to this node when the request was dispatched to the node with affinity and that node did not take it.
local home = redis.call('GET', key)
if not home or (home == before and node ~= before) then redis.call('SET', key, node, 'PX', HOME_MS) end
return {attempts, doubtful, now_ms() - found[1], found[2]}
