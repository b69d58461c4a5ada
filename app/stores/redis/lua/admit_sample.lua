-- Take in a sampling request, once, and with it the version of the adapter it is to have and the node that is to run it.
-- ARGV: request id, parent id, owner, queue, payload, digest, tokens it may take, its sequences, most requests and most
-- tokens that may be unfinished in its queue (or '' for any).
-- Returns {'fresh', node to ring, '' for whoever comes first}, or {what, requests or tokens that are unfinished there}:
-- repeat | conflict | too_large | requests | tokens
local request, sampler, queue, tokens = ARGV[1], ARGV[2], ARGV[4], tonumber(ARGV[7])

-- A sampler as a request finds it: for how many more sequences its batch has room (below 0: so many wait for some), how
-- many make a batch, and whether it begins on another request; nil when it is gone, not well, or reads another queue.
local function look_at(node)
  local found = redis.call('HMGET', 'tinsmith:workers:' .. node, 'queue', 'healthy', 'batch', 'holds')
  if not found[1] or cjson.decode(found[1]) ~= queue or found[2] ~= 'true' then return nil end
  local placed = tonumber(redis.call('HGET', 'tinsmith:placed:' .. queue, node) or 0)
  return {node = node, room = found[3] - placed, batch = tonumber(found[3]), takes = placed < tonumber(found[4])}
end

-- Of those that take another request the one with the most room; of equals each has its share of the keys, always the
-- same, so that adapters spread while little goes on and come back after a pause.
local function emptiest(key)
  local best = {node = '', room = -math.huge}
  for _, node in ipairs(redis.call('ZRANGE', 'tinsmith:index:workers', 0, -1)) do
    local found = look_at(node)
    if found and found.takes then
      found.place = redis.sha1hex(key .. node)
      if found.room > best.room or (found.room == best.room and found.place < best.place) then best = found end
    end
  end
  return best
end

-- Where this adapter was sampled before, as long as there is room: then where there is some. While there is none at all
-- it stays at home unless another is a whole batch ahead. Its home is another one only when that is lost.
local function pick(adapter)
  local key = home_of(request, adapter)
  local home = redis.call('GET', key)
  local here = home and look_at(home)
  local chosen = here
  if not here or here.room <= 0 then
    local best = emptiest(key)
    local stays = here and here.takes and best.room <= 0 and best.room - here.room < here.batch
    if not stays then chosen = best end
  end
  if here then
    redis.call('PEXPIRE', key, HOME_MS)
  elseif chosen.node ~= '' then
    redis.call('SET', key, chosen.node, 'PX', HOME_MS)
  else
    redis.call('DEL', key)
  end
  return chosen.node
end

local known = redis.call('HGET', 'tinsmith:future:' .. request, 'digest')
if known then return {known == ARGV[6] and 'repeat' or 'conflict', 0} end
if ARGV[9] ~= '' then
  if tokens > tonumber(ARGV[10]) then return {'too_large', 0} end
  local requests = redis.call('HLEN', 'tinsmith:sampling:' .. queue)
  if requests >= tonumber(ARGV[9]) then return {'requests', requests} end
  local held = tonumber(redis.call('HGET', 'tinsmith:sampling_tokens', queue) or 0)
  if held + tokens > tonumber(ARGV[10]) then return {'tokens', held} end
end
local refusal = no_room(#ARGV[5])
if refusal then return refusal end
local now = now_ms()
hear(redis.call('HGET', 'tinsmith:samplers:' .. sampler, 'session_id'), now)
local adapter = adapter_of(sampler)
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', 'sample', 'attempts', 0, 'admitted', now, 'adapter', adapter,
           'rows', ARGV[8])
redis.call('SET', 'tinsmith:payload:' .. request, ARGV[5])
count_payload(request, #ARGV[5], now)
redis.call('HSET', 'tinsmith:future:' .. request, 'kind', 'sample', 'model', sampler, 'owner', ARGV[3],
           'digest', ARGV[6], 'state', 'pending', 'admitted', now)
redis.call('ZADD', 'tinsmith:pending', now, request)
redis.call('HSET', 'tinsmith:pending_queue', request, queue)
redis.call('HSET', 'tinsmith:sampling:' .. queue, request, tokens)
redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, tokens)
redis.call('SADD', 'tinsmith:sampled:' .. sampler, request)
redis.call('SADD', 'tinsmith:samplers_asked', sampler)
local node = pick(adapter)
place(request, queue, node)
return {'fresh', node}
