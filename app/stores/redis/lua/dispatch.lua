-- The dispatch of sampling requests: the choice of a node, and the throttle.

-- part: place
-- Count a sampling request's sequences at one node; with '', at no node. Returns the node where they counted before.
local function place(request, queue, node)
  local op, placed = 'tinsmith:op:' .. request, 'tinsmith:placed:' .. queue
  local found = redis.call('HMGET', op, 'node', 'rows')
  local before, rows = found[1] or '', found[2] or 1
  if before == node then return before end
  if before ~= '' and redis.call('HINCRBY', placed, before, -rows) == 0 then redis.call('HDEL', placed, before) end
  if node ~= '' then redis.call('HINCRBY', placed, node, rows) end
  redis.call('HSET', op, 'node', node)
  return before
end

-- part: affinity
-- An adapter's affinity expires so long after its last request: by then its engine may well have evicted the adapter.
local AFFINITY_MS = 3600000

-- The key of an adapter's affinity, the node that samples with it. Requests for the base model use the sampler's id.
local function affinity_key(request, adapter)
  return 'tinsmith:home:' .. (adapter and adapter ~= '' and adapter or request:match('^(.*):%d+$'))
end

-- part: look_at
-- The load of a sampler: `room`, the sequences that still fit into its batch (below 0: the sequences that wait for
-- room); `batch`, the sequences of a full batch; `takes`, true if it is given another request. nil when the sampler is
-- gone, unhealthy, or reads another queue.
local function look_at(node, queue)
  local found = redis.call('HMGET', 'tinsmith:workers:' .. node, 'queue', 'healthy', 'batch', 'holds')
  if not found[1] or cjson.decode(found[1]) ~= queue or found[2] ~= 'true' then return nil end
  local placed = tonumber(redis.call('HGET', 'tinsmith:placed:' .. queue, node) or 0)
  local batch, holds = tonumber(found[3]), tonumber(found[4])
  -- `placed` counts sequences and `holds` requests: a few requests for many sequences each do not fill a sampler.
  return {node = node, room = batch - placed, batch = batch, takes = placed < math.max(batch, holds)}
end

-- part: pick
-- needs: affinity, look_at
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
-- While no node has room, the node with affinity stays, unless another node is a whole batch ahead. This moves the
-- affinity only when its node is lost; `claim_sample` moves it when its node did not take the request.
local function pick(request, queue, adapter)
  local key = affinity_key(request, adapter)
  local home = redis.call('GET', key)
  local here = home and look_at(home, queue)
  local chosen = here
  if not here or here.room <= 0 then
    local best = emptiest(key, queue)
    local stays = here and here.takes and best.room <= 0 and best.room - here.room < here.batch
    if not stays then chosen = best end
  end
  if here then
    redis.call('PEXPIRE', key, AFFINITY_MS)
  elseif chosen.node ~= '' then
    redis.call('SET', key, chosen.node, 'PX', AFFINITY_MS)
  else
    redis.call('DEL', key)
  end
  return chosen.node
end

-- part: throttled
-- Added to a throttled request's score in `pending`. It sorts behind all entries that may need a redispatch; redispatch
-- reads only a limited number of entries.
local THROTTLED_MS = 1e13

-- The key of a project's throttled requests, the oldest first.
local function throttled_key(queue, project) return 'tinsmith:held:' .. queue .. '/' .. project end

-- Remove a request from the throttled ones.
local function unthrottle(request, queue, project)
  local key = throttled_key(queue, project)
  redis.call('ZREM', key, request)
  if redis.call('EXISTS', key) == 0 then redis.call('SREM', 'tinsmith:holding:' .. queue, project) end
end

-- Throttle a request: it is dispatched once `release_samples` finds room for it.
local function throttle(request, queue, project, now)
  redis.call('HSET', 'tinsmith:op:' .. request, 'ring', 'held')
  redis.call('ZADD', 'tinsmith:pending', now + THROTTLED_MS, request)
  redis.call('ZADD', throttled_key(queue, project), now, request)
  redis.call('SADD', 'tinsmith:holding:' .. queue, project)
end

-- part: paused
-- The key of a sampler's paused requests, and of the sequences of a queue's paused requests by project.
local function paused_key(sampler) return 'tinsmith:paused:' .. sampler end
local function paused_rows(queue) return 'tinsmith:paused_rows:' .. queue end

-- part: requeued
-- needs: now_ms
-- A requeued request counts for its project for this time. A live worker begins it much sooner. A process of an earlier
-- version that begins or ends it leaves it on the list.
local REQUEUED_MS = 3600000

-- The key of a project's requeued requests, and of the projects that have some, each with the ms of the last requeue.
local function requeued_key(queue, project) return 'tinsmith:off:' .. queue .. '/' .. project end
local function requeued_projects(queue) return 'tinsmith:off_projects:' .. queue end

-- The earliest score that counts on these lists.
local function requeued_since() return now_ms() - REQUEUED_MS end

-- Add to one of these lists, without what counts no more.
local function note_requeued(key, member)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. requeued_since())
  redis.call('ZADD', key, now_ms(), member)
  redis.call('PEXPIRE', key, REQUEUED_MS)
end

-- Requeue a request that its project no longer counts as dispatched.
local function requeue(request, queue, project)
  redis.call('HSET', 'tinsmith:op:' .. request, 'ring', 'off')
  note_requeued(requeued_key(queue, project), request)
  note_requeued(requeued_projects(queue), project)
end

-- Remove a request from the requeued ones.
local function leave_requeued(request, queue, project)
  local key = requeued_key(queue, project)
  redis.call('ZREM', key, request)
  if redis.call('EXISTS', key) == 0 then redis.call('ZREM', requeued_projects(queue), project) end
end

-- part: leave_project
-- needs: paused, requeued, throttled
-- Stop counting a dispatched, throttled, requeued or paused sampling request for its project. Returns the project.
local function leave_project(request, queue)
  local found = redis.call('HMGET', 'tinsmith:op:' .. request, 'ring', 'rows')
  local project = redis.call('HGET', 'tinsmith:future:' .. request, 'owner')
  if found[1] == 'rung' then
    local rung = 'tinsmith:rung:' .. queue
    if redis.call('HINCRBY', rung, project, -found[2]) == 0 then redis.call('HDEL', rung, project) end
    redis.call('HINCRBY', 'tinsmith:rung_rows', queue, -found[2])
  elseif found[1] == 'held' then
    unthrottle(request, queue, project)
  elseif found[1] == 'off' then
    leave_requeued(request, queue, project)
  elseif found[1] == 'paused' then
    redis.call('SREM', paused_key(request:match('^(.*):%d+$')), request)
    local rows = paused_rows(queue)
    if redis.call('HINCRBY', rows, project, -found[2]) == 0 then redis.call('HDEL', rows, project) end
  end
  return project
end

-- part: may_dispatch
-- needs: look_at
-- DISPATCHED_BATCHES batches of sequences are dispatched at once: one that is decoded, and two whose requests are
-- ready, or have finished in part. Up to DISPATCHED_LEAST sequences are always dispatched.
local DISPATCHED_BATCHES, DISPATCHED_LEAST = 3, 64

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
-- no dispatched request. The total stays within DISPATCHED_LEAST. All projects together have less than enough
-- dispatched sequences. Or they have less than twice enough, and the project stays within its equal part of enough.
-- Without the last case, a project with few requests would wait for earlier ones of another project, and come too late
-- for the batch that begins then.
local function may_dispatch(queue, project, rows)
  local mine = tonumber(redis.call('HGET', 'tinsmith:rung:' .. queue, project) or 0)
  local all = tonumber(redis.call('HGET', 'tinsmith:rung_rows', queue) or 0)
  if mine == 0 or all + rows <= DISPATCHED_LEAST then return true end
  local enough = DISPATCHED_BATCHES * batches(queue)
  local most = math.max(DISPATCHED_LEAST, enough)
  return all < enough or all < 2 * most and mine + rows <= most / redis.call('HLEN', 'tinsmith:rung:' .. queue)
end

-- part: count_dispatched
-- Count a request as dispatched for its project, until it finishes or is requeued.
local function count_dispatched(request, queue, project)
  local op = 'tinsmith:op:' .. request
  local rows = redis.call('HGET', op, 'rows')
  redis.call('HSET', op, 'ring', 'rung')
  redis.call('HINCRBY', 'tinsmith:rung:' .. queue, project, rows)
  redis.call('HINCRBY', 'tinsmith:rung_rows', queue, rows)
end

-- part: dispatch
-- needs: count_dispatched, pick, place
-- Dispatch a request. Returns the node to dispatch to, or ''.
local function dispatch(request, queue, project)
  count_dispatched(request, queue, project)
  local node = pick(request, queue, redis.call('HGET', 'tinsmith:op:' .. request, 'adapter'))
  place(request, queue, node)
  return node
end

-- script: release_samples flags=allow-oom
-- needs: dispatch, may_dispatch, now_ms, throttled
-- Dispatch as many throttled requests of a queue as there is room for, in rounds of one request per project.
-- ARGV: queue, projects that come after the others, in this order. Returns {request id, node or ''} of each.
local queue, rank, due = ARGV[1], {}, {}
for i = 2, #ARGV do rank[ARGV[i]] = i end
local projects = redis.call('SMEMBERS', 'tinsmith:holding:' .. queue)
table.sort(projects, function(a, b)
  local first, second = rank[a] or 0, rank[b] or 0
  return first < second or (first == second and a < b)
end)

-- Dispatch the oldest request of a project, if there is room for it. Returns true if there was room.
local function release(project)
  local request = redis.call('ZRANGE', throttled_key(queue, project), 0, 0)[1]
  if not request then return false end
  local rows = tonumber(redis.call('HGET', 'tinsmith:op:' .. request, 'rows'))
  if not may_dispatch(queue, project, rows) then return false end
  unthrottle(request, queue, project)
  due[#due + 1] = {request, dispatch(request, queue, project)}
  redis.call('ZADD', 'tinsmith:pending', now_ms(), request)
  return true
end

local went_on = true
while went_on do
  went_on = false
  for _, project in ipairs(projects) do went_on = release(project) or went_on end
end
return due
