-- Put before every script, behind prelude.lua: where sampling requests go, and which of them are rung for.

-- A sampler as a request finds it: for how many more sequences its batch has room (below 0: so many wait for some), how
-- many make a batch, and whether it begins on another request; nil when it is gone, not well, or reads another queue.
local function look_at(node, queue)
  local found = redis.call('HMGET', 'tinsmith:workers:' .. node, 'queue', 'healthy', 'batch', 'holds')
  if not found[1] or cjson.decode(found[1]) ~= queue or found[2] ~= 'true' then return nil end
  local placed = tonumber(redis.call('HGET', 'tinsmith:placed:' .. queue, node) or 0)
  return {node = node, room = found[3] - placed, batch = tonumber(found[3]), takes = placed < tonumber(found[4])}
end

-- Of those that take another request the one with the most room; of equals each has its share of the keys, always the
-- same, so that adapters spread while little goes on and come back after a pause.
local function emptiest(key, queue)
  local best = {node = '', room = -math.huge}
  for _, node in ipairs(redis.call('ZRANGE', 'tinsmith:index:workers', 0, -1)) do
    local found = look_at(node, queue)
    if found and found.takes then
      found.place = redis.sha1hex(key .. node)
      if found.room > best.room or (found.room == best.room and found.place < best.place) then best = found end
    end
  end
  return best
end

-- Where this adapter was sampled before, as long as there is room: then where there is some. While there is none at all
-- it stays at home unless another is a whole batch ahead. Its home is another one only when that is lost.
local function pick(request, queue, adapter)
  local key = home_of(request, adapter)
  local home = redis.call('GET', key)
  local here = home and look_at(home, queue)
  local chosen = here
  if not here or here.room <= 0 then
    local best = emptiest(key, queue)
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

-- So many batches of sequences are rung for at once: one that is decoded, and two whose requests are ready, or have ended
-- in part. So many sequences always are.
local RUNG_BATCHES, RUNG_LEAST = 3, 64

local batches_of = {}

-- How many sequences all samplers of a queue decode at once; looked up once a script, which may ask for every project.
local function batches(queue)
  if batches_of[queue] then return batches_of[queue] end
  local sum = 0
  for _, node in ipairs(redis.call('ZRANGE', 'tinsmith:index:workers', 0, -1)) do
    local found = look_at(node, queue)
    if found then sum = sum + found.batch end
  end
  batches_of[queue] = sum
  return sum
end

-- Whether a project may have a request of so many sequences rung for: while there are not enough of all together, or it
-- has less than its part of as many and there are not twice as many; one request in any case. With less than its part,
-- who has few under way would wait for what another rang for before, and come too late for the batch that begins then.
local function may_ring(queue, project, rows)
  local mine = tonumber(redis.call('HGET', 'tinsmith:rung:' .. queue, project) or 0)
  local all = tonumber(redis.call('HGET', 'tinsmith:rung_rows', queue) or 0)
  if mine == 0 or all + rows <= RUNG_LEAST then return true end
  local enough = RUNG_BATCHES * batches(queue)
  local most = math.max(RUNG_LEAST, enough)
  return all < enough or all < 2 * most and mine + rows <= most / redis.call('HLEN', 'tinsmith:rung:' .. queue)
end

local function hold(request, queue, project, now)
  redis.call('HSET', 'tinsmith:op:' .. request, 'ring', 'held')
  redis.call('ZADD', 'tinsmith:pending', now + HELD_MS, request)
  redis.call('ZADD', held_key(queue, project), now, request)
  redis.call('SADD', 'tinsmith:holding:' .. queue, project)
end

-- Count a request as rung for, for its project, until it ends or is put off.
local function count_rung(request, queue, project)
  local op = 'tinsmith:op:' .. request
  local rows = redis.call('HGET', op, 'rows')
  redis.call('HSET', op, 'ring', 'rung')
  redis.call('HINCRBY', 'tinsmith:rung:' .. queue, project, rows)
  redis.call('HINCRBY', 'tinsmith:rung_rows', queue, rows)
end

-- Have a request rung for. Returns the node to ring, or ''.
local function ring(request, queue, project)
  count_rung(request, queue, project)
  local node = pick(request, queue, redis.call('HGET', 'tinsmith:op:' .. request, 'adapter'))
  place(request, queue, node)
  return node
end
