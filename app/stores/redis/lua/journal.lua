-- The journal of a model's Ops: admission, refusal, commit and snapshot.

-- part: register_model
-- needs: list_owned, list_run
-- Register a model with nothing applied. Its fields are ARGV from `first` on: field, value, ...
local function register_model(model, first)
  redis.call('HSET', 'tinsmith:models:' .. model, 'applied', -1, 'epoch', 0, 'worker', '', 'snapshot', '',
             'snapshot_seq', -1, unpack(ARGV, first))
  redis.call('ZADD', 'tinsmith:index:models', 0, model)
  list_run(model, 'SADD')
  list_owned('model', model)
end

-- part: train_queue
-- The queue that a model's trainers read; train_queue in app/dispatch.py must agree.
local function train_queue(model)
  local found = redis.call('HMGET', 'tinsmith:models:' .. model, 'base_model', 'full')
  return (found[2] == 'true' and 'full.' or 'train.') .. cjson.decode(found[1])
end

-- part: doom
-- An entry takes 3 us to doom, and everybody else waits for the server meanwhile.
local DOOMED_AT_ONCE = 200

-- Doom the Ops that wait behind a lost gradient, up to and including the next optim_step: they fail with `reason`. If
-- more than DOOMED_AT_ONCE Ops wait, only the first ones are doomed now. The last of them keeps the reason in `dooms`.
-- When it commits, it dooms the next slice.
local function doom(model, seq, reason)
  local journal, op = 'tinsmith:journal:' .. model, ''
  local waiting = redis.call('ZRANGEBYSCORE', journal, '(' .. seq, '+inf', 'LIMIT', 0, DOOMED_AT_ONCE)
  for _, later in ipairs(waiting) do
    op = 'tinsmith:op:' .. model .. ':' .. later
    redis.call('HSETNX', op, 'doomed', reason)
    if redis.call('HGET', op, 'kind') == 'optim_step' then return end
  end
  if #waiting == DOOMED_AT_ONCE then redis.call('HSETNX', op, 'dooms', reason) end
end

-- part: bounds
-- The SDK sends all calls one after the other. Only clients of an earlier version of the server send the parts of one
-- call at the same time, the first one last. A call with MOST_MISSING parts would have a million datums. The journal
-- keeps about 1 kB for each missing seq that it gives up.
local MOST_MISSING = 1024

-- Returns true if more than MOST_MISSING seqs before `seq` have not arrived.
local function is_far(model, applied, seq)
  local between = seq - applied - 1
  if between <= MOST_MISSING then return false end
  return between - redis.call('ZCOUNT', 'tinsmith:journal:' .. model, '(' .. applied, '(' .. seq) > MOST_MISSING
end

-- Returns true if a model's creation failed, and no admitted Op waits behind `seq`. Such a model has no snapshot, so its
-- journal is never trimmed.
local function has_failed(model, seq)
  return redis.call('HGET', 'tinsmith:models:' .. model, 'state') == '"failed"'
         and redis.call('ZCOUNT', 'tinsmith:journal:' .. model, '(' .. seq, '+inf') == 0
end

-- part: handed_over
-- The prefixes of a model's adapters that are not in the object store yet. '0' is the character after '/'.
local function handed_over(model)
  local prefix = 'models/' .. model
  return redis.call('ZRANGEBYLEX', 'tinsmith:index:handovers', '[' .. prefix .. '/', '(' .. prefix .. '0')
end

-- script: create_model
-- needs: register_model
-- Register a model with nothing applied. ARGV: model id, then field, value, ...
-- Returns 1, or 0 when the model exists already.
if redis.call('EXISTS', 'tinsmith:models:' .. ARGV[1]) == 1 then return 0 end
register_model(ARGV[1], 2)
return 1

-- script: admit
-- needs: bounds, content, hear, list_run, no_room, no_room_for_results, now_ms, pages, register_model, take, train_queue
-- Journal an Op and its pending future, once. ARGV: payload, or '' with the key that will hold it (or ''), its size;
-- model id, seq, request id, kind, digest, charge (or ''), entry in its project's audit log (or ''), context of its trace
-- (or ''), path and prefix as JSON of the checkpoint that it loads (or ''), and for a model to register in the same step:
-- field, value, ...
-- Returns {outcome, lease holder}; the outcome is fresh | repeat | conflict | refused (with its reason instead of the
-- holder) | consumed | far | unknown | ended | failed | changed (the checkpoint's path instead of the holder) | absent (to
-- be admitted once the key holds the payload).
-- Returns {'limited', ...} as `over_limit` in limits.lua does.
local content = content_of(ARGV[1], ARGV[2], tonumber(ARGV[3]))
local model, seq, request, kind, digest = ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local charge, audited, trace, source, prefix, FIELDS = ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13], 14

-- If later Ops wait for this one, its refusal would keep them from ever draining. But all seqs before a single Op far
-- ahead are awaited in turn. So without room a model gets LET_IN bytes of them, up to and including the one beyond.
local LET_IN = 16 * 2 ^ 20

local function is_awaited(applied, let_in)
  return seq == applied + 1 and tonumber(let_in or 0) < LET_IN
         and redis.call('ZCOUNT', 'tinsmith:journal:' .. model, '(' .. seq, '+inf') > 0
end

-- A client that began under an earlier version of the server (with parallel_fwdbwd_chunks) sends the first part of a
-- large batch last, and nothing behind the batch before that. The second part passed the rate limits itself; refused calls
-- and later calls of other kinds did not, and do not count here. Ops that were journaled before the model's last exempt call (up to the
-- seq `exempted`) exempt no second one, or else many small Ops, sent ahead one seq apart, would exempt all large ones
-- between them.
local function is_awaited_by_parts(applied, exempted)
  if seq ~= applied + 1 or seq < tonumber(exempted or 0) then return false end
  local request = model .. ':' .. (seq + 1)
  local kind = redis.call('HGET', 'tinsmith:op:' .. request, 'kind')
  return (kind == 'forward_backward' or kind == 'forward')
         and redis.call('HEXISTS', 'tinsmith:future:' .. request, 'refused') == 0
end

-- Note that a call was admitted although there was no room for it (`lets_in`), or over the rates (`exempt`). `let_in`: the
-- bytes of earlier ones of the former.
local function note_exceptions(lets_in, let_in, exempt)
  local key = 'tinsmith:models:' .. model
  if lets_in then
    redis.call('HINCRBY', key, 'let_in', content.size)
  elseif let_in then
    redis.call('HDEL', key, 'let_in')
  end
  if exempt then
    redis.call('HSET', key, 'exempted', redis.call('ZREVRANGE', 'tinsmith:journal:' .. model, 0, 0)[1])
  end
end

-- Returns true if the checkpoint was deleted or overwritten since it was read, or is being deleted: its files may go
-- before a replay reads them.
local function is_source_changed()
  if source == '' then return false end
  local found = redis.call('HMGET', 'tinsmith:checkpoints:' .. source, 'prefix', 'deleting')
  return found[1] ~= prefix or found[2] == prefix
end

local function admit()
  local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'applied', 'owner', 'ended', 'unloaded', 'let_in',
                          'exempted')
  if not head[1] and #ARGV < FIELDS then return {'unknown', ''} end
  local holder = redis.call('GET', 'tinsmith:lease:' .. model) or ''
  local known = redis.call('HMGET', 'tinsmith:future:' .. request, 'digest', 'refused')
  if known[2] then return {'refused', known[2]} end
  if known[1] then return {known[1] == digest and 'repeat' or 'conflict', holder} end
  if head[3] then return {'ended', ''} end
  local applied = tonumber(head[1] or -1)
  if seq <= applied then return {'consumed', ''} end
  if has_failed(model, seq) then return {'failed', ''} end
  if is_far(model, applied, seq) then return {'far', ''} end
  if is_source_changed() then return {'changed', source} end
  local refusal = no_room(content.size) or head[2] and no_room_for_results(cjson.decode(head[2]))
  if refusal and not is_awaited(applied, head[5]) then return refusal end
  local exempt = charge ~= '' and is_awaited_by_parts(applied, head[6])
  local check = content.is_absent() and over_limits or take
  local limited = charge ~= '' and check(cjson.decode(charge), exempt)
  if limited then return limited end
  if content.is_absent() then return {'absent', ''} end
  note_exceptions(refusal, head[5], exempt)
  if not head[1] then
    register_model(model, FIELDS)
    head = redis.call('HMGET', 'tinsmith:models:' .. model, 'applied', 'owner')
  end
  local now = now_ms()
  hear(redis.call('HGET', 'tinsmith:models:' .. model, 'session_id'), now)
  redis.call('HSET', 'tinsmith:op:' .. request, 'kind', kind, 'attempts', 0, 'admitted', now)
  content.store(request, now)
  redis.call('HSET', 'tinsmith:future:' .. request, 'kind', kind, 'model', model,
             'owner', cjson.decode(head[2]), 'digest', digest, 'state', 'pending', 'admitted', now)
  if trace ~= '' then redis.call('HSET', 'tinsmith:future:' .. request, 'trace', trace) end
  redis.call('ZADD', 'tinsmith:journal:' .. model, seq, seq)
  redis.call('HSET', 'tinsmith:models:' .. model, 'last_request', now)
  if head[4] then list_run(model, 'SADD') end
  if audited ~= '' then
    redis.call('HSET', page_of('audit', cjson.decode(head[2]), hour_now()), request, string.format('%.0f ', now) .. audited)
  end
  redis.call('ZADD', 'tinsmith:pending', 'NX', now, model)
  redis.call('HSET', 'tinsmith:pending_queue', model, train_queue(model))
  return {'fresh', holder}
end

return content.answered(admit())

-- script: refuse flags=allow-oom
-- needs: bounds, doom, no_room, now_ms, train_queue
-- Consume a seq that will never run. If that loses a gradient, doom the Ops behind it, up to the next optim_step.
-- ARGV: model id, seq, reason, kind to journal (skip | lost_batch | forward_backward | drop_gradients).
-- Returns 1, or 0 when the seq is taken, when too many seqs before it are missing, or when the model has ended or its
-- creation failed.
local model, seq, reason = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local applied = redis.call('HGET', 'tinsmith:models:' .. model, 'applied')
if not applied or seq <= tonumber(applied) then return 0 end
if is_far(model, tonumber(applied), seq) then return 0 end
if redis.call('HEXISTS', 'tinsmith:models:' .. model, 'ended') == 1 or has_failed(model, seq) then return 0 end
local request = model .. ':' .. ARGV[2]
if redis.call('EXISTS', 'tinsmith:op:' .. request) == 1 then return 0 end

-- No limit counts refused calls, and a client may send them without end. A model keeps the notes of the last ones, and
-- takes so many in a row ahead of its worker.
local MOST_REFUSED = 1024
local journal = 'tinsmith:journal:' .. model
local former = 'tinsmith:future:' .. model .. ':' .. (seq - MOST_REFUSED)
local is_kept = redis.call('HEXISTS', former, 'refused') == 1

-- If later Ops wait only for this seq, its record lets them run, and so frees memory.
local function is_awaited()
  return redis.call('ZCOUNT', journal, '(' .. applied, '(' .. seq) == seq - applied - 1
         and redis.call('ZCOUNT', journal, '(' .. seq, '+inf') > 0
end

if is_kept and seq - MOST_REFUSED > tonumber(applied) then
  return redis.error_reply('FULL ' .. MOST_REFUSED .. ' refused calls of this model wait for a worker')
end
local refusal = no_room(0)
if refusal and not is_awaited() then return refusal end
if is_kept then redis.call('DEL', former) end  -- `admit` finds its seq consumed
if ARGV[4] ~= 'skip' then doom(model, seq, reason) end
local now = now_ms()
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', ARGV[4], 'attempts', 0, 'admitted', now,
           'doomed', reason)
redis.call('HSET', 'tinsmith:future:' .. request, 'refused', reason)
redis.call('ZADD', journal, seq, seq)
redis.call('ZADD', 'tinsmith:pending', 'NX', now, model)
redis.call('HSET', 'tinsmith:pending_queue', model, train_queue(model))
return 1

-- script: commit flags=allow-oom
-- needs: change_record, count_usage, doom, drop_payload, history, now_ms, result
-- Commit an Op: seq becomes the applied seq, and its result can be read. ARGV: model id, epoch, seq, state, type, body,
-- seconds to keep, JSON list of {namespace, id, {field = value}} to record in the same step, reason of a failure, JSON
-- of its usage, the key that holds the body (or ''), the body's size, a point of the model's progress as JSON (or ''),
-- the tokens it trained. Returns 1, or 0 when fenced.
local MOST_POINTS = 1000  -- 150 kB a model, and at most 500 kB
local KEPT_S = 30 * 24 * 3600  -- after the last of them
local model, seq = ARGV[1], tonumber(ARGV[3])
local key = 'tinsmith:models:' .. model
local head = redis.call('HMGET', key, 'epoch', 'applied', 'owner', 'steps', 'trained_tokens')
local request = model .. ':' .. ARGV[3]
local kind = redis.call('HGET', 'tinsmith:op:' .. request, 'kind')
local is_next = head[1] == ARGV[2] and tonumber(head[2]) == seq - 1 and is_current(model)
if not is_next or not kind then  -- without a kind, nothing was admitted there
  redis.call('DEL', ARGV[11])
  return 0
end
local result = result_of(ARGV[4], ARGV[5], ARGV[6], ARGV[11], ARGV[12])
if not result then return lapsed() end
if ARGV[13] == '' then
  redis.call('HSET', key, 'applied', seq)
else
  redis.call('HSET', key, 'applied', seq, 'steps', (head[4] or 0) + (kind == 'optim_step' and 1 or 0),
             'trained_tokens', (head[5] or 0) + ARGV[14])
  redis.call('XADD', 'tinsmith:progress:' .. model, 'MAXLEN', MOST_POINTS, '*', 'seq', seq, 'kind', kind,
             'point', ARGV[13])
  redis.call('EXPIRE', 'tinsmith:progress:' .. model, KEPT_S)
end
if ARGV[4] == 'failed' or kind == 'forward' or kind == 'save_weights' then
  drop_payload(request)  -- no replay runs it
end
local dooms = redis.call('HGET', 'tinsmith:op:' .. request, 'dooms')
if dooms then doom(model, seq, dooms) end
if ARGV[4] == 'failed' then
  -- A failed Op left the model as it was, so a replay must not run it.
  redis.call('HSETNX', 'tinsmith:op:' .. request, 'doomed', ARGV[9])
  local why = redis.call('HGET', 'tinsmith:op:' .. request, 'doomed')
  -- A refused one has doomed what waited behind it at its refusal; the caller knows of it since then.
  if kind == 'forward_backward' and redis.call('HEXISTS', 'tinsmith:future:' .. request, 'refused') == 0 then
    doom(model, seq, why)
  end
  if kind == 'create_model' then redis.call('HSET', key, 'state', '"failed"') end
end
local future = 'tinsmith:future:' .. request
redis.call('EXPIRE', future, ARGV[7])
if redis.call('HEXISTS', future, 'state') == 1 then
  store_result(request, result, ARGV[7])
else
  redis.call('DEL', result.staged)
end
for _, write in ipairs(cjson.decode(ARGV[8])) do
  change_record(write[1], write[2], function()
    for field, value in pairs(write[3]) do
      redis.call('HSET', 'tinsmith:' .. write[1] .. ':' .. write[2], field, value)
    end
    if write[3].owner then
      redis.call('HSET', 'tinsmith:' .. write[1] .. ':' .. write[2], 'owner', head[3])  -- it may have moved since
    end
  end)
  redis.call('ZADD', 'tinsmith:index:' .. write[1], 0, write[2])
end
if ARGV[4] == 'done' then count_usage(key, model, ARGV[10]) end
local later = redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. model, '(' .. seq, '+inf', 'LIMIT', 0, 1)
if #later == 0 then
  redis.call('ZREM', 'tinsmith:pending', model)
  redis.call('HDEL', 'tinsmith:pending_queue', model)
else
  redis.call('ZADD', 'tinsmith:pending', now_ms(), model)
end
redis.call('PUBLISH', 'tinsmith:done', request)
return 1

-- part: trim
-- needs: drop_payload
-- An entry takes 30 to 70 us to delete, and up to 370 while a fork rewrites the append-only file (pages are copied).
-- Everybody else waits for the server meanwhile.
local TRIMMED_AT_ONCE = 50

-- Delete the first entries of a model's journal, up to a seq, at most TRIMMED_AT_ONCE of them; `forget`, if given, is
-- called with the request id of each. Returns true if more are left.
local function trim(model, last, forget)
  local journal = 'tinsmith:journal:' .. model
  local seqs = redis.call('ZRANGEBYSCORE', journal, '-inf', last, 'LIMIT', 0, TRIMMED_AT_ONCE)
  for _, seq in ipairs(seqs) do
    local request = model .. ':' .. seq
    if forget then forget(request) end
    drop_payload(request)
    redis.call('DEL', 'tinsmith:op:' .. request)
  end
  if #seqs > 0 then redis.call('ZREMRANGEBYSCORE', journal, '-inf', seqs[#seqs]) end
  return #seqs == TRIMMED_AT_ONCE
end

-- script: trim flags=allow-oom
-- needs: trim
-- Trim a model's journal behind its snapshot further. ARGV: model id. Returns 1 if entries may be left, else 0.
return trim(ARGV[1], redis.call('HGET', 'tinsmith:models:' .. ARGV[1], 'snapshot_seq') or -1) and 1 or 0

-- script: set_snapshot flags=allow-oom
-- needs: handed_over, history, trim
-- Point a model at a durable snapshot, and begin to trim the journal behind it. ARGV: model id, epoch, seq, reference.
-- Returns the replaced reference (its own for a repeat). Returns 0 while an adapter that is not in the object store yet
-- could only be made again from the Ops to trim. Returns false for a stale epoch or a snapshot that is not newer.
local key = 'tinsmith:models:' .. ARGV[1]
local head = redis.call('HMGET', key, 'epoch', 'snapshot_seq', 'snapshot', 'applied')
if not is_current(ARGV[1]) then return false end
if head[1] == ARGV[2] and head[3] == ARGV[4] then return ARGV[4] end  -- a repeat, whose answer was lost
if head[1] ~= ARGV[2] or tonumber(ARGV[3]) <= tonumber(head[2]) or tonumber(ARGV[3]) > tonumber(head[4]) then
  return false
end
for _, prefix in ipairs(handed_over(ARGV[1])) do
  if tonumber(redis.call('HGET', 'tinsmith:handovers:' .. prefix, 'seq')) <= tonumber(ARGV[3]) then return 0 end
end
redis.call('HSET', key, 'snapshot', ARGV[4], 'snapshot_seq', ARGV[3])
trim(ARGV[1], ARGV[3])
return head[3]
