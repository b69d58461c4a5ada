-- Leases of models, of workers' names and of roles, and the attempts of workers at a request.

-- part: node_of
-- The node of a worker "node/boot": the part of its name that names the machine, the target of a dispatch.
local function node_of(worker) return worker:match('^(.*)/') end

-- part: begin
-- needs: node_of, now_ms
-- Returns true if a worker that began an Op, and did not report that it left the Op, is alive: it renews a lease on its
-- own name. When `worker` is a new process of the same node, the process before it is dead.
local function is_heard(boot, worker)
  local life = 'tinsmith:lease:' .. boot
  if node_of(boot) == node_of(worker) then redis.call('DEL', life) end
  return redis.call('EXISTS', life) == 1
end

-- Begin an Op or a sampling request. Every earlier worker that began this request and now looks dead counts as one
-- attempt. If such a worker is heard again, it was only cut off, and its attempt is taken back. `former` maps these
-- workers to the ms when each was first missed, or to 0. Returns the number of attempts, and 1 if one is of a worker
-- missed for less than a lease, else 0.
local function begin(op, worker, lease_ms)
  local found = redis.call('HMGET', op, 'runner', 'former')
  local former, now, more, doubtful = cjson.decode(found[2] or '{}'), now_ms(), 0, 0
  if found[1] then former[found[1]] = former[found[1]] or 0 end
  for boot, missed in pairs(former) do
    if boot == worker or is_heard(boot, worker) then
      if missed > 0 then more = more - 1 end
      former[boot] = boot ~= worker and 0 or nil
    else
      if missed == 0 then
        more = more + 1
        former[boot] = now
      end
      -- If the server's clock was set back since, the worker was missed now: the doubt lasts for one more lease.
      former[boot] = math.min(former[boot], now)
      if node_of(boot) ~= node_of(worker) and now - former[boot] < tonumber(lease_ms) then doubtful = 1 end
    end
  end
  redis.call('HSET', op, 'runner', worker, 'former', cjson.encode(former))
  return redis.call('HINCRBY', op, 'attempts', more), doubtful
end

-- part: leave
-- Note that a live worker no longer runs an Op or a sampling request: its start does not count as an attempt.
local function leave(op, worker)
  local found = redis.call('HMGET', op, 'runner', 'former')
  if found[1] == worker then redis.call('HDEL', op, 'runner') end
  local former = cjson.decode(found[2] or '{}')
  if former[worker] then
    if former[worker] > 0 then redis.call('HINCRBY', op, 'attempts', -1) end
    former[worker] = nil
    redis.call('HSET', op, 'former', cjson.encode(former))
  end
end

-- part: history
-- Returns true if a model's epoch was given out in this history of the state server.
local function is_current(model)
  return redis.call('HGET', 'tinsmith:models:' .. model, 'history') == redis.call('HGET', 'tinsmith:history', 'number')
end

-- script: begin_history flags=allow-oom
-- needs: now_ms
-- Begin a history if the primary is new. ARGV: the primary's replication id, a new one for each promotion and each start.
-- Returns 1 if a primary was followed by another one, else 0.
-- The lost end of the former history may hold epochs, and files named for them, that this server does not know. So every
-- owner is fenced, and epochs grow with the number of the history, its start in ms, which grows faster than models change
-- their owners. The count of completions passes all cursors that clients may have.
local FAR = 1048576  -- no lost end completed so many requests
local found = redis.call('HMGET', 'tinsmith:history', 'primary', 'number')
if found[1] == ARGV[1] then return 0 end
local number, former = now_ms(), tonumber(found[2] or 0)
if number <= former then number = former + FAR end  -- the new primary's clock is behind
redis.call('HSET', 'tinsmith:history', 'primary', ARGV[1], 'number', string.format('%.0f', number))
redis.call('INCRBY', 'tinsmith:completions', FAR)
return found[1] and 1 or 0

-- script: acquire flags=allow-oom
-- needs: history, node_of
-- Take the lease of a model. ARGV: model id, worker ("node/boot"), lease in ms.
-- Returns {epoch, applied, snapshot, snapshot_seq, epoch_floor}; {} for an unknown model; {holder} while another node
-- owns the model; {'ended', ''} for a model that has ended.
-- An older process of the same node is replaced at once: node names are unique, and the new epoch fences that process.
-- So is an owner in an earlier history. Files of that history are never taken for files of this one (`epoch_floor`).
local key = 'tinsmith:models:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then return {} end
if redis.call('HEXISTS', key, 'ended') == 1 then return {'ended', ''} end
local held, current = redis.call('GET', 'tinsmith:lease:' .. ARGV[1]), is_current(ARGV[1])
if held and current and node_of(held) ~= node_of(ARGV[2]) then return {held} end
redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[2], 'PX', ARGV[3])
if not current then
  local number = redis.call('HGET', 'tinsmith:history', 'number')
  local epoch = redis.call('HINCRBY', key, 'epoch', number - (redis.call('HGET', key, 'history') or 0))
  redis.call('HSET', key, 'history', number, 'epoch_floor', epoch, 'worker', ARGV[2])
elseif redis.call('HGET', key, 'worker') ~= ARGV[2] then
  redis.call('HINCRBY', key, 'epoch', 1)
  redis.call('HSET', key, 'worker', ARGV[2])
end
local head = redis.call('HMGET', key, 'epoch', 'applied', 'snapshot', 'snapshot_seq', 'epoch_floor')
head[5] = head[5] or '0'
return head

-- script: renew flags=allow-oom
-- needs: history
-- Extend the leases that the worker still holds, and the lease on its own name, which shows that it lives. ARGV:
-- worker, lease in ms, ids... Returns the ids whose leases are lost. All are renewed in one step, so that a worker that
-- dies with an Op is missed when the Op's lease lapses, not later. A model of an earlier history is lost. A paused
-- sampling request is lost too; its lease lasts until the worker has stopped it.
redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[1], 'PX', ARGV[2])
local lost = {}
for i = 3, #ARGV do
  local key = 'tinsmith:lease:' .. ARGV[i]
  local is_past = redis.call('EXISTS', 'tinsmith:models:' .. ARGV[i]) == 1 and not is_current(ARGV[i])
  if redis.call('GET', key) == ARGV[1] and not is_past then
    redis.call('PEXPIRE', key, ARGV[2])
    if redis.call('HGET', 'tinsmith:op:' .. ARGV[i], 'ring') == 'paused' then lost[#lost + 1] = ARGV[i] end
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost

-- script: claim_node flags=allow-oom
-- Take the name of a node for a worker, unless a live worker of another boot has it. ARGV: node, worker, lease in ms,
-- the worker's claim (JSON with its name as "worker"), a claim whose process is known to be over (or '').
-- Returns '', or the claim of the live worker.
local found = redis.call('HGET', 'tinsmith:nodes', ARGV[1])
if found and found ~= ARGV[5] then
  local holder = cjson.decode(found).worker
  if holder ~= ARGV[2] and redis.call('EXISTS', 'tinsmith:lease:' .. holder) == 1 then return found end
end
redis.call('HSET', 'tinsmith:nodes', ARGV[1], ARGV[4])
redis.call('SET', 'tinsmith:lease:' .. ARGV[2], ARGV[2], 'PX', ARGV[3])
return ''

-- script: silent_nodes
-- List the claims of workers that are not heard. Returns {node, claim, ...}.
local silent, all = {}, redis.call('HGETALL', 'tinsmith:nodes')
for i = 1, #all, 2 do
  if redis.call('EXISTS', 'tinsmith:lease:' .. cjson.decode(all[i + 1]).worker) == 0 then
    silent[#silent + 1] = all[i]
    silent[#silent + 1] = all[i + 1]
  end
end
return silent

-- script: forget_node flags=allow-oom
-- Delete a claim unless its worker is heard, or another one took the name. ARGV: node, claim. Returns 1, or 0.
if redis.call('HGET', 'tinsmith:nodes', ARGV[1]) ~= ARGV[2] then return 0 end
if redis.call('EXISTS', 'tinsmith:lease:' .. cjson.decode(ARGV[2]).worker) == 1 then return 0 end
return redis.call('HDEL', 'tinsmith:nodes', ARGV[1])

-- script: release
-- Give up a lease if this worker holds it. ARGV: id, worker. Returns 0.
local key = 'tinsmith:lease:' .. ARGV[1]
if redis.call('GET', key) == ARGV[2] then redis.call('DEL', key) end
return 0

-- script: lead flags=allow-oom
-- Take or keep the lead in a role. ARGV: role, worker, lease in ms. Returns 1 while this worker leads, else 0.
local key = 'tinsmith:lease:' .. ARGV[1]
local holder = redis.call('GET', key)
if holder and holder ~= ARGV[2] then return 0 end
redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
return 1

-- script: next flags=allow-oom
-- needs: begin, brought, history, now_ms
-- Start the Op at a seq. ARGV: model id, epoch, seq, worker, lease in ms, most bytes of content to bring along, or '' when
-- the content is read already.
-- Returns {kind, doomed, attempts, ms since admission, 1 if an attempt is in doubt, the model's owner as JSON, content},
-- {} when the Op has not arrived, 0 for a stale epoch, or 'read' without a change when the content has to be read first.
local model, request = ARGV[1], ARGV[1] .. ':' .. ARGV[3]
if redis.call('HGET', 'tinsmith:models:' .. model, 'epoch') ~= ARGV[2] or not is_current(model) then return 0 end
local op, content = 'tinsmith:op:' .. request, ''
if redis.call('EXISTS', op) == 0 then return {} end
if ARGV[6] ~= '' then content = brought(request, op, ARGV[6]) end
if not content then return 'read' end
local attempts, doubtful = begin(op, ARGV[4], ARGV[5])
local found = redis.call('HMGET', op, 'kind', 'doomed', 'admitted')
return {found[1], found[2] or '', attempts, now_ms() - found[3], doubtful,
        redis.call('HGET', 'tinsmith:models:' .. model, 'owner') or '""', content}

-- script: begin_restore flags=allow-oom
-- needs: begin, history
-- Begin the restore of a model. ARGV: model id, epoch, worker, lease in ms, seconds after which deaths are forgotten.
-- Returns {restores that ended their worker, 1 if one is in doubt}, or 0 for a stale epoch.
if redis.call('HGET', 'tinsmith:models:' .. ARGV[1], 'epoch') ~= ARGV[2] or not is_current(ARGV[1]) then return 0 end
local key = 'tinsmith:restore:' .. ARGV[1]
local is_new = redis.call('EXISTS', key) == 0
local deaths, doubtful = begin(key, ARGV[3], ARGV[4])
if is_new then redis.call('EXPIRE', key, ARGV[5]) end
return {deaths, doubtful}

-- script: end_restore flags=allow-oom
-- needs: leave
-- Note that a worker survived the restore of a model. ARGV: model id, worker, 1 if it restored the model, 1 to add to
-- the deaths. Returns 0.
local key = 'tinsmith:restore:' .. ARGV[1]
if ARGV[3] == '1' then
  redis.call('DEL', key)
elseif redis.call('EXISTS', key) == 1 then
  leave(key, ARGV[2])
  redis.call('HINCRBY', key, 'attempts', ARGV[4])
end
return 0

-- script: leave flags=allow-oom
-- needs: leave
-- Note that a live worker no longer runs the Op at a seq, also when another worker owns the model by now. ARGV: model
-- id, epoch, seq, worker, attempts to add. The attempts are not added when the epoch is stale. Returns 0.
local op = 'tinsmith:op:' .. ARGV[1] .. ':' .. ARGV[3]
if redis.call('EXISTS', op) == 1 then
  leave(op, ARGV[4])
  if redis.call('HGET', 'tinsmith:models:' .. ARGV[1], 'epoch') == ARGV[2] then
    redis.call('HINCRBY', op, 'attempts', ARGV[5])
  end
end
return 0
