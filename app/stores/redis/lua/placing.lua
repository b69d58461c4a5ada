-- A part of every script, behind prelude.lua: the choice of a node for sampling requests, and their throttled dispatch.

-- The load of a sampler: `room`, the sequences that still fit into its batch (below 0: so many sequences wait for
-- room); `batch`, the sequences of a full batch; `takes`, true if it begins another request. nil when the sampler is
-- gone, unhealthy, or reads another queue.
local function look_at(node, queue)
  local found = redis.call('HMGET', 'tinsmith:workers:' .. node, 'queue', 'healthy', 'batch', 'holds')
  if not found[1] or cjson.decode(found[1]) ~= queue or found[2] ~= 'true' then return nil end
  local placed = tonumber(redis.call('HGET', 'tinsmith:placed:' .. queue, node) or 0)
  return {node = node, room = found[3] - placed, batch = tonumber(found[3]), takes = placed < tonumber(found[4])}
end

-- The node with the most room among those that take another request. Among equals a hash of key and node decides: each
-- node always gets the same share of the keys. So adapters spread at low load, and return to their node after a pause.
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

-- The node for a request. The node with the adapter's affinity is chosen while it has room, else a node that has room.
-- While no node has room, the node with affinity stays, unless another node is a whole batch ahead. The affinity moves
-- only when its node is lost.
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

-- RUNG_BATCHES batches of sequences are dispatched at once: one that is decoded, and two whose requests are ready, or
-- have finished in part. Up to RUNG_LEAST sequences are always dispatched.
local RUNG_BATCHES, RUNG_LEAST = 3, 64

local batches_of = {}

-- The sequences that all samplers of a queue decode at once. It is read once per script, which may need it for every
-- project.
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

-- Returns true if a project's request of `rows` sequences may be dispatched, which is so in four cases. The project has
-- no dispatched request. The total stays within RUNG_LEAST. All projects together have less than enough dispatched
-- sequences. Or they have less than twice enough, and the project stays within its equal part of enough. Without the
-- last case, a project with few requests would wait for earlier ones of another project, and come too late for the
-- batch that begins then.
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

-- Count a request as dispatched for its project, until it finishes or is requeued.
local function count_rung(request, queue, project)
  local op = 'tinsmith:op:' .. request
  local rows = redis.call('HGET', op, 'rows')
  redis.call('HSET', op, 'ring', 'rung')
  redis.call('HINCRBY', 'tinsmith:rung:' .. queue, project, rows)
  redis.call('HINCRBY', 'tinsmith:rung_rows', queue, rows)
end

-- Dispatch a request. Returns the node to dispatch to, or ''.
local function ring(request, queue, project)
  count_rung(request, queue, project)
  local node = pick(request, queue, redis.call('HGET', 'tinsmith:op:' .. request, 'adapter'))
  place(request, queue, node)
  return node
end
