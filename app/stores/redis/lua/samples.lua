-- Sampling requests, from admission to the poll of their results.

-- part: count_samples
-- Count a sampling request's sequences for its payers (sign 1), or stop counting them (sign -1).
local function count_samples(request, sign)
  local found = redis.call('HMGET', 'tinsmith:op:' .. request, 'payers', 'rows')
  for payer in (found[1] or ''):gmatch('%S+') do
    local held = redis.call('HINCRBY', 'tinsmith:sampling_of', payer, sign * (found[2] or 1))
    if held == 0 then redis.call('HDEL', 'tinsmith:sampling_of', payer) end
  end
end

-- part: note_completion
-- Note that a sampler's request finished, for polls of all requests of one clone; ids.target_of must agree on the key.
local function note_completion(sampler, seq, request, keep_s)
  local key = 'tinsmith:completed:' .. sampler .. '/' .. (#seq > 9 and seq:sub(1, -10) or '0')
  redis.call('ZADD', key, redis.call('INCR', 'tinsmith:completions'), request)
  redis.call('EXPIRE', key, keep_s)
end

-- part: count_sampled
-- needs: count_usage
-- Count the usage of a sampling request as `count_usage` does, also after its sampler has ended.
local function count_sampled(request, run, usage)
  local sampler = request:match('^(.*):%d+$')
  local record = 'tinsmith:samplers:' .. sampler
  if redis.call('EXISTS', record) == 0 then record = 'tinsmith:ended_samplers:' .. sampler end
  count_usage(record, run, usage)
end

-- part: close_sample
-- needs: count_samples, drop_payload, leave_project, note_completion, place, result
-- Stop counting a sampling request in its queue, at its node and for its sampler; call before op:<request> is deleted.
local function leave_queue(request, sampler)
  local queue = redis.call('HGET', 'tinsmith:pending_queue', request)
  local tokens = queue and redis.call('HGET', 'tinsmith:sampling:' .. queue, request)
  if tokens then
    place(request, queue, '')
    leave_project(request, queue)
    count_samples(request, -1)
    redis.call('HDEL', 'tinsmith:sampling:' .. queue, request)
    redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, -tokens)
  end
  redis.call('SREM', 'tinsmith:sampled:' .. sampler, request)
  if redis.call('EXISTS', 'tinsmith:sampled:' .. sampler) == 0 then
    redis.call('SREM', 'tinsmith:samplers_asked', sampler)
  end
  redis.call('ZREM', 'tinsmith:pending', request)
  redis.call('HDEL', 'tinsmith:pending_queue', request)
end

-- Store a sampling request's result and delete all its other state; the first result stays.
-- Returns true if this result was the first.
local function close_sample(request, result, keep_s)
  if redis.call('HGET', 'tinsmith:future:' .. request, 'state') ~= 'pending' then return false end
  store_result(request, result, keep_s)
  local sampler, seq = request:match('^(.*):(%d+)$')
  note_completion(sampler, seq, request, keep_s)
  drop_payload(request)
  leave_queue(request, sampler)
  redis.call('DEL', 'tinsmith:op:' .. request, 'tinsmith:lease:' .. request)
  redis.call('PUBLISH', 'tinsmith:done', request)
  return true
end

-- part: abort_sample
-- needs: close_sample, note_revoked, refund, result
-- Cancel a sampling request, and notify the worker that may be running it. Without such a worker, its whole charge is
-- refunded at once; else the unused part, when the worker reports its usage, which is counted then. Returns as
-- close_sample does.
local function abort_sample(request, keep_s, type, body)
  local charged = charged_for(request)
  charged.runner = redis.call('GET', 'tinsmith:lease:' .. request) or nil
  if not close_sample(request, result_of('failed', type, body, '', #body), keep_s) then return false end
  if charged.runner then
    redis.call('SET', 'tinsmith:stopped:' .. request, cjson.encode(charged), 'EX', keep_s)
  else
    give_back(charged, '{}')
  end
  note_revoked(request)
  redis.call('PUBLISH', 'tinsmith:aborted', request)
  return true
end

-- script: admit_sample
-- needs: content, count_samples, dispatch, hear, may_dispatch, no_room, no_room_for_results, now_ms, paused, requeued, take, throttled
-- Journal a sampling request, once, with the adapter version that it uses and the node that it is dispatched to.
-- ARGV: payload, or '' with the key that will hold it (or ''), its size; request id, parent id, owner, queue, digest,
-- tokens it may take, its sequences, most requests and most tokens that may be unfinished in its queue (or '' for no
-- bound), charge, the names of its payers, context of its trace (or '').
-- Returns {'fresh', node to dispatch to, or '' for any node}, or {'held', ''} when the request is throttled. Else
-- returns {repeat | conflict | unknown | given_up | too_large | requests | tokens, unfinished requests or tokens in the queue},
-- {'absent', ''} when it is admitted once the key holds the payload, or {'limited', ...} as `over_limit` in limits.lua
-- does.
local content = content_of(ARGV[1], ARGV[2], tonumber(ARGV[3]))
local request, sampler, owner, queue, digest = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local tokens, rows, charge, payers = tonumber(ARGV[9]), ARGV[10], ARGV[13], ARGV[14]
local most_requests, most_tokens, trace = ARGV[11], ARGV[12], ARGV[15]

-- The object-store prefix of the adapter for a sampler's next request; '' for the base model, nil if it was given up.
local function adapter_of(sampler)
  local found = redis.call('HMGET', 'tinsmith:samplers:' .. sampler, 'prefix', 'follows', 'given_up')
  local follows = cjson.decode(found[2] or '""')
  local newest = follows ~= '' and redis.call('HGET', 'tinsmith:models:' .. follows, 'inflight')
  if found[3] and not newest then return nil end
  return cjson.decode(newest or found[1] or '""')
end

-- True if a full queue admits one more request of a project, because other projects filled it. With `most` requests as
-- the bound, the project has fewer than an equal part of them unfinished. A dispatched or paused request counts once for
-- each of its sequences, a throttled or requeued one once. With '' (the queue is full of tokens, which are not counted by
-- project), it has none unfinished.
local function is_below_share(project, most)
  local unfinished, others, counted = redis.call('ZCARD', throttled_key(queue, project)), 0, {[project] = true}
  local function count(projects)
    for _, other in ipairs(projects) do
      if not counted[other] then others = others + 1 end
      counted[other] = true
    end
  end
  for _, rows in ipairs({'tinsmith:rung:' .. queue, paused_rows(queue)}) do
    unfinished = unfinished + (redis.call('HGET', rows, project) or 0)
    count(redis.call('HKEYS', rows))
  end
  unfinished = unfinished + redis.call('ZCOUNT', requeued_key(queue, project), requeued_since(), '+inf')
  count(redis.call('ZRANGEBYSCORE', requeued_projects(queue), requeued_since(), '+inf'))
  return others > 0 and unfinished < (most == '' and 1 or most / (others + 1))
end

local function admit()
  local known = redis.call('HGET', 'tinsmith:future:' .. request, 'digest')
  if known then return {known == digest and 'repeat' or 'conflict', 0} end
  local session = redis.call('HGET', 'tinsmith:samplers:' .. sampler, 'session_id')
  if not session then return {'unknown', 0} end  -- it went since it was looked up, and nobody knows of which adapter it was
  local adapter = adapter_of(sampler)
  if not adapter then return {'given_up', 0} end
  if most_requests ~= '' then
    if tokens > tonumber(most_tokens) then return {'too_large', 0} end
    local requests = redis.call('HLEN', 'tinsmith:sampling:' .. queue)
    local held = tonumber(redis.call('HGET', 'tinsmith:sampling_tokens', queue) or 0)
    if requests >= tonumber(most_requests) and not is_below_share(owner, most_requests) then return {'requests', requests} end
    if held + tokens > tonumber(most_tokens) and not is_below_share(owner, '') then return {'tokens', held} end
  end
  local refusal = no_room(content.size) or no_room_for_results(owner)
  if refusal then return refusal end
  local check = content.is_absent() and over_limits or take
  local limited = charge ~= '' and check(cjson.decode(charge))
  if limited then return limited end
  if content.is_absent() then return {'absent', ''} end
  local now = now_ms()
  hear(session, now)
  redis.call('ZADD', 'tinsmith:samplers_used', now, sampler)
  redis.call('HSET', 'tinsmith:op:' .. request, 'kind', 'sample', 'attempts', 0, 'admitted', now, 'adapter', adapter,
             'rows', rows, 'payers', payers)
  count_samples(request, 1)
  content.store(request, now)
  redis.call('HSET', 'tinsmith:future:' .. request, 'kind', 'sample', 'model', sampler, 'owner', owner,
             'digest', digest, 'state', 'pending', 'admitted', now)
  if trace ~= '' then redis.call('HSET', 'tinsmith:future:' .. request, 'trace', trace) end
  redis.call('ZADD', 'tinsmith:pending', now, request)
  redis.call('HSET', 'tinsmith:pending_queue', request, queue)
  redis.call('HSET', 'tinsmith:sampling:' .. queue, request, tokens)
  redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, tokens)
  redis.call('SADD', 'tinsmith:sampled:' .. sampler, request)
  redis.call('SADD', 'tinsmith:samplers_asked', sampler)
  if redis.call('EXISTS', throttled_key(queue, owner)) == 1 or not may_dispatch(queue, owner, tonumber(rows)) then
    throttle(request, queue, owner, now)
    return {'held', ''}
  end
  return {'fresh', dispatch(request, queue, owner)}
end

return content.answered(admit())

-- script: claim_sample flags=allow-oom
-- needs: affinity, begin, brought, count_dispatched, leave, leave_project, node_of, now_ms, place
-- Start a sampling request. ARGV: request id, worker ("node/boot"), lease in ms, most attempts or '', most bytes of
-- content to bring along, or '' when the content is read already.
-- Returns {attempts, 1 if one attempt is in doubt, ms since admission, adapter or false, content}; {} when it is terminal,
-- 0 while another worker runs it or it is paused, 1 when it had more than the most attempts, or 'read' without a change
-- when the content has to be read first.
local op, content = 'tinsmith:op:' .. ARGV[1], ''
if redis.call('EXISTS', op) == 0 then return {} end
if redis.call('HGET', op, 'ring') == 'paused' then return 0 end
if ARGV[5] ~= '' then content = brought(ARGV[1], op, ARGV[5]) end
if not content then return 'read' end
if not redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[2], 'NX', 'PX', ARGV[3]) then return 0 end
local attempts, doubtful = begin(op, ARGV[2], ARGV[3])
if ARGV[4] ~= '' and attempts > tonumber(ARGV[4]) then
  leave(op, ARGV[2])
  redis.call('DEL', 'tinsmith:lease:' .. ARGV[1])
  return 1
end
local found = redis.call('HMGET', op, 'admitted', 'adapter', 'ring')
local node, queue = node_of(ARGV[2]), redis.call('HGET', 'tinsmith:pending_queue', ARGV[1])
if found[3] == 'off' then count_dispatched(ARGV[1], queue, leave_project(ARGV[1], queue)) end
local before = place(ARGV[1], queue, node)
local key = affinity_key(ARGV[1], found[2])
-- Affinity moves to this node when the request was dispatched to the node with affinity and that node did not take it.
local home = redis.call('GET', key)
if not home or (home == before and node ~= before) then redis.call('SET', key, node, 'PX', AFFINITY_MS) end
return {attempts, doubtful, now_ms() - found[1], found[2], content}

-- script: put_off_sample flags=allow-oom
-- needs: count_sampled, leave, leave_project, place, refund, requeued
-- Requeue a sampling request that a live worker cannot run now. It costs no attempt. If that worker held its lease, any
-- worker may take it; one that is throttled or paused stays so, and keeps its place. For a request that was cancelled
-- while the worker ran it, its usage is counted, and the unused tokens are refunded. ARGV: request id, worker, JSON of its
-- usage. Returns 0.

-- Settle a cancelled request, once, when the worker that ran it reports its usage.
local function settle_stopped(request, worker, usage)
  local key = 'tinsmith:stopped:' .. request
  local charged = cjson.decode(redis.call('GET', key) or '{}')
  if charged.runner == worker then
    redis.call('DEL', key)
    give_back(charged, usage)
    count_sampled(request, charged.run, usage)
  end
end

local op, lease = 'tinsmith:op:' .. ARGV[1], 'tinsmith:lease:' .. ARGV[1]
settle_stopped(ARGV[1], ARGV[2], ARGV[3])
leave(op, ARGV[2])
if redis.call('GET', lease) == ARGV[2] then
  local queue, ring = redis.call('HGET', 'tinsmith:pending_queue', ARGV[1]), redis.call('HGET', op, 'ring')
  place(ARGV[1], queue, '')
  if ring ~= 'paused' and ring ~= 'held' then
    requeue(ARGV[1], queue, leave_project(ARGV[1], queue))  -- what cannot run keeps nothing from being rung for
  end
  redis.call('DEL', lease)
end
return 0

-- script: finish_sample flags=allow-oom
-- needs: close_sample, count_sampled, refund, result, routed
-- Store a sampling request's result; the first result stays, and its usage is counted. With routes, their files become
-- the request's, and their bytes count. ARGV: request id, state, type, body, or '' with the key that holds it (or ''), its
-- size, seconds to keep, JSON of its usage, and with routes: day and attempt as in the files' names, bytes, seconds to
-- keep. Returns 1, or 0 when the request had a result already.
local request, keep_s, usage = ARGV[1], ARGV[7], ARGV[8]
local day, attempt, bytes, keep_routes_s = ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local result = result_of(ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
if not result then return lapsed() end
local charged = charged_for(request)
if not close_sample(request, result, keep_s) then
  redis.call('DEL', result.staged)
  return 0
end
if day then
  redis.call('SET', 'tinsmith:routes:' .. request, day .. '/' .. attempt, 'EX', keep_routes_s)
  count_routes(day, charged.payers, bytes)
end
give_back(charged, usage)
if result.state == 'done' then count_sampled(request, charged.run, usage) end
return 1

-- script: cancel_sample flags=allow-oom
-- needs: abort_sample
-- Cancel a sampling request, unless it has a result. ARGV: request id, seconds to keep, type and body of its result.
-- Returns 1, or 0 when it had a result already.
return abort_sample(ARGV[1], ARGV[2], ARGV[3], ARGV[4]) and 1 or 0

-- script: abort_samples flags=allow-oom
-- needs: abort_sample
-- End the unfinished requests of those samplers that no longer exist, or whose session has ended and has not been
-- reopened. ARGV: most requests, seconds to keep, type and body of their result, sampler ids. Returns the number of
-- requests ended.
local ended, most = 0, tonumber(ARGV[1])

local function is_over(sampler)
  local session = redis.call('HGET', 'tinsmith:samplers:' .. sampler, 'session_id')
  return not session or redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(session))
end

for i = 5, #ARGV do
  if ended < most and is_over(ARGV[i]) then
    for _, request in ipairs(redis.call('SRANDMEMBER', 'tinsmith:sampled:' .. ARGV[i], most - ended)) do
      if abort_sample(request, ARGV[2], ARGV[3], ARGV[4]) then ended = ended + 1 end
    end
  end
end
return ended

-- script: completions flags=allow-oom
-- List the requests of a poll target that finished after a cursor; entries up to the cursor are deleted.
-- ARGV: target, cursor, most requests. Returns {cursor of the last one, request id, state, bytes, ...}
local key = 'tinsmith:completed:' .. ARGV[1]
local cursor = ARGV[2]
local newest = redis.call('GET', 'tinsmith:completions') or '0'
if tonumber(cursor) > tonumber(newest) then cursor = '0' end  -- of a history this server does not know
redis.call('ZREMRANGEBYSCORE', key, '-inf', cursor)
local found = redis.call('ZRANGE', key, 0, ARGV[3] - 1, 'WITHSCORES')
local rows = {found[#found] or cursor}
for i = 1, #found, 2 do
  local future = 'tinsmith:future:' .. found[i]
  rows[#rows + 1] = found[i]
  rows[#rows + 1] = redis.call('HGET', future, 'state') or 'done'
  rows[#rows + 1] = tonumber(redis.call('HGET', future, 'size') or redis.call('HSTRLEN', future, 'body'))
end
return rows
