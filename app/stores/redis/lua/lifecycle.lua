-- The ends of sessions, models and samplers.

-- part: list_runs
-- needs: list_run
-- A run takes 3 us to list. `relist_runs` corrects the lists of further ones.
local LISTED_AT_ONCE = 1000

-- List the runs of a session for their payers ('SADD'), or take them off ('SREM').
local function list_runs(session, how)
  local prefix = session .. ':train:'
  local first, last = '[' .. prefix, '(' .. prefix .. '\255'
  for _, model in ipairs(redis.call('ZRANGEBYLEX', 'tinsmith:index:models', first, last, 'LIMIT', 0, LISTED_AT_ONCE)) do
    list_run(model, how)
  end
end

-- part: hear
-- needs: list_runs, list_session
-- Note that a session (its id as JSON, or false) is in use. An expired session is open again; one that its client
-- finished keeps that status.
local function hear(session, now)
  if not session then return end
  local id = cjson.decode(session)
  if redis.call('ZADD', 'tinsmith:sessions_heard', now, id) == 1 then
    list_session(id)  -- it may have ended before, and it and its runs have been taken out
    list_runs(id, 'SADD')
  end
  redis.call('ZREM', 'tinsmith:sessions_ended', id)
  local key = 'tinsmith:sessions:' .. id
  if redis.call('HGET', key, 'status') == '"expired"' then redis.call('HSET', key, 'status', '"open"') end
end

-- part: is_retired
-- needs: now_ms
-- Returns true if a session (its id as JSON) ended at least `least` ms ago and was not reopened since.
local function is_retired(session, least)
  local ended = redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(session))
  return ended and now_ms() - ended >= tonumber(least)
end

-- script: calls_taken flags=allow-oom
-- needs: now_ms
-- Each call of this script is a look. Returns how many ms ago the last break ended. A look that finds no API process is
-- a break. Two looks more than UNSEEN_MS apart are one too: the state server or all workers were away, the machine
-- slept, or the clock was set forward. So is a clock that was set back. The looks of one leader and of the next, which
-- waits for the end of a lease of 15 s, are less apart.
local UNSEEN_MS = 40000
local key, now = 'tinsmith:calls_taken', now_ms()
local found = redis.call('HMGET', key, 'since', 'seen')
local since, passed = tonumber(found[1] or now), now - tonumber(found[2] or now)
if passed < 0 or passed > UNSEEN_MS or redis.call('EXISTS', 'tinsmith:taking_calls') == 0 then since = now end
redis.call('HSET', key, 'since', since, 'seen', now)
return now - since

-- script: take_calls flags=allow-oom
-- Note that an API process accepts calls, and that it reads results in pieces. Without memory for the note, no session
-- would expire. An earlier version notes ''. It writes as often as this one, so that one of two writes finds it.
-- ARGV: ms. Returns 1.
local former = redis.call('SET', 'tinsmith:taking_calls', 'pieces', 'PX', ARGV[1], 'GET')
if former and former ~= 'pieces' then redis.call('SET', 'tinsmith:earlier_api', '', 'PX', ARGV[1]) end
return 1

-- script: heartbeat flags=allow-oom
-- needs: hear, now_ms
-- Note a heartbeat of a session's client. ARGV: session id. Returns 0.
-- A session that its client finished stays finished, but its time until removal starts again.
local now = now_ms()
local status = redis.call('HGET', 'tinsmith:sessions:' .. ARGV[1], 'status')
if status ~= '"expired"' and redis.call('ZSCORE', 'tinsmith:sessions_ended', ARGV[1]) then
  redis.call('ZADD', 'tinsmith:sessions_ended', now, ARGV[1])
else
  hear(cjson.encode(ARGV[1]), now)
end
return 0

-- script: poll flags=allow-oom
-- needs: now_ms
-- Note that a client of a session waits for a result; a session that has ended stays so. ARGV: session id. Returns 0.
-- Each write waits for the disk, and a client may have thousands of polls: one in POLL_MS is noted.
local POLL_MS = 10000
local heard, now = redis.call('ZSCORE', 'tinsmith:sessions_heard', ARGV[1]), now_ms()
if heard and now - heard > POLL_MS then redis.call('ZADD', 'tinsmith:sessions_heard', now, ARGV[1]) end
return 0

-- script: finish flags=allow-oom
-- needs: list_runs, list_session, now_ms
-- Finish a session for its client; the first reason stays, with its detail. ARGV: session id, reason as JSON, detail as
-- JSON (or ''). Returns 0.
local key = 'tinsmith:sessions:' .. ARGV[1]
local status = redis.call('HGET', key, 'status')
if status == '"open"' or status == '"expired"' then
  redis.call('HSET', key, 'status', ARGV[2])
  if ARGV[3] ~= '' then redis.call('HSET', key, 'detail', ARGV[3]) end
end
redis.call('ZREM', 'tinsmith:sessions_heard', ARGV[1])
redis.call('ZADD', 'tinsmith:sessions_ended', 'NX', now_ms(), ARGV[1])
list_session(ARGV[1])
list_runs(ARGV[1], 'SREM')
return 0

-- script: expire flags=allow-oom
-- needs: now_ms
-- End the sessions that are silent for longer than ARGV[1]. ARGV: ms of silence, most sessions. Returns their ids.
local now = now_ms()
local silent = redis.call('ZRANGEBYSCORE', 'tinsmith:sessions_heard', '-inf', now - ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(silent) do
  redis.call('ZREM', 'tinsmith:sessions_heard', id)
  redis.call('ZADD', 'tinsmith:sessions_ended', 'NX', now, id)
  local key = 'tinsmith:sessions:' .. id
  if redis.call('HGET', key, 'status') == '"open"' then redis.call('HSET', key, 'status', '"expired"') end
end
return silent

-- script: forget flags=allow-oom
-- needs: is_retired, list_session
-- Remove the record of a session that has nothing left but custom losses, after these; of many a slice.
-- ARGV: session id, ms since which it must have ended, prefix of its losses' ids. Returns 1, 0 when the session is open
-- again, or 2 when losses are left.
local REMOVED_AT_ONCE = 200
if not is_retired(cjson.encode(ARGV[1]), ARGV[2]) then return 0 end
local prefix, index = ARGV[3], 'tinsmith:index:losses'
local losses = redis.call('ZRANGEBYLEX', index, '[' .. prefix, '(' .. prefix .. '\255', 'LIMIT', 0, REMOVED_AT_ONCE)
for _, id in ipairs(losses) do
  local loss = 'tinsmith:losses:' .. id
  local quotes = 2  -- the content is JSON text
  redis.call('HINCRBY', 'tinsmith:sessions:' .. ARGV[1], 'loss_bytes', quotes - redis.call('HSTRLEN', loss, 'content'))
  redis.call('DEL', loss)
  redis.call('ZREM', index, id)
end
if #losses == REMOVED_AT_ONCE then return 2 end
redis.call('ZREM', 'tinsmith:sessions_ended', ARGV[1])
redis.call('DEL', 'tinsmith:sessions:' .. ARGV[1])
redis.call('ZREM', 'tinsmith:index:sessions', ARGV[1])
list_session(ARGV[1])
return 1

-- script: move_session flags=allow-oom
-- needs: change_record, list_session
-- Move a session, with its models, samplers, losses and checkpoints, to another project; of a large one a slice. A
-- checkpoint that is recorded meanwhile gets the owner of its model (`put_reserved`), so the models come first.
-- ARGV: session id, project as JSON, and to go on: kind of record and id, as returned. Returns 1, or 0 when the session
-- does not exist, or was moved elsewhere since the first slice; {kind, id} when more is left.
local session, owner, kind, after = ARGV[1], ARGV[2], tonumber(ARGV[3] or 1), ARGV[4] or ''
local KINDS = {{'models', ':train:'}, {'samplers', ':sample:'}, {'losses', ':loss:'}, {'checkpoints', ':train:'}}
local MOVED_AT_ONCE = 200
local key = 'tinsmith:sessions:' .. session
if redis.call('EXISTS', key) == 0 then return 0 end
if ARGV[3] then
  if redis.call('HGET', key, 'owner') ~= owner then return 0 end
else
  redis.call('HSET', key, 'owner', owner)
  list_session(session)
end

local function move(namespace, id)
  local record = 'tinsmith:' .. namespace .. ':' .. id
  if redis.call('EXISTS', record) == 1 then
    change_record(namespace, id, function() redis.call('HSET', record, 'owner', owner) end)
  end
end

local left = MOVED_AT_ONCE
while KINDS[kind] do
  local namespace, prefix = KINDS[kind][1], session .. KINDS[kind][2]
  if namespace == 'checkpoints' then prefix = 'tinker://' .. prefix end
  local first = after == '' and '[' .. prefix or '(' .. after
  local ids = redis.call('ZRANGEBYLEX', 'tinsmith:index:' .. namespace, first, '(' .. prefix .. '\255', 'LIMIT', 0, left)
  for _, id in ipairs(ids) do move(namespace, id) end
  left = left - #ids
  if left == 0 then return {kind, ids[#ids]} end
  kind, after = kind + 1, ''
end
return 1

-- part: note_revoked
-- More futures than these end without a run only in a storm; the dashboard then misses the oldest ones.
local MOST_REVOKED = 10000

-- Note that a future ended without a result of a run, for the task event that a maintenance task sends of it.
local function note_revoked(request)
  redis.call('RPUSH', 'tinsmith:revoked', request)
  redis.call('LTRIM', 'tinsmith:revoked', -MOST_REVOKED, -1)
end

-- part: end_calls
-- needs: note_revoked, now_ms, trim
-- Delete a slice of an ended model's journal: its waiting calls fail with a result of `type` and `body`, kept for
-- `keep_s` seconds. `ending` lists the model while entries are left.
local function end_calls(model, keep_s, type, body)
  local function fail(request)
    local future = 'tinsmith:future:' .. request
    if redis.call('HGET', future, 'state') == 'pending' then
      redis.call('HSET', future, 'state', 'failed', 'type', type, 'body', body, 'ended', now_ms())
      note_revoked(request)
      redis.call('PUBLISH', 'tinsmith:done', request)
    end
    redis.call('EXPIRE', future, keep_s, 'NX')  -- those of consumed seqs have no end yet either
  end
  redis.call(trim(model, '+inf', fail) and 'SADD' or 'SREM', 'tinsmith:ending', model)
end

-- script: end_calls flags=allow-oom
-- needs: end_calls
-- Delete a slice of the journal of one model that has ended. ARGV: seconds to keep results, type and body of a waiting
-- future's result. Returns 1, or 0 when no such model has a journal.
local model = redis.call('SRANDMEMBER', 'tinsmith:ending')
if not model then return 0 end
end_calls(model, ARGV[1], ARGV[2], ARGV[3])
return 1

-- script: end_model flags=allow-oom
-- needs: end_calls, handed_over, is_retired, list_run
-- End a model for good: its owner is fenced, its snapshot pointer and progress are deleted, and so is its journal, whose
-- waiting calls fail. Of a long journal, `end_calls` deletes the rest.
-- ARGV: model id, seconds to keep results, type and body of a waiting future's result,
-- ms since which its session must have ended (or '' to end the model in any case).
-- Returns {base model, lease holder or '', 'true' for full fine-tuning}; {} when the model does not exist, or when its
-- session is open again.
local model = ARGV[1]
local key = 'tinsmith:models:' .. model
local head = redis.call('HMGET', key, 'applied', 'base_model', 'session_id', 'ended', 'full')
if not head[1] then return {} end
if ARGV[5] ~= '' and not is_retired(head[3], ARGV[5]) then return {} end

local holder = redis.call('GET', 'tinsmith:lease:' .. model) or ''
if not head[4] then
  list_run(model, 'SREM')
  redis.call('HINCRBY', key, 'epoch', 1)
  redis.call('HSET', key, 'ended', 'deleted', 'worker', '', 'snapshot', '')
  end_calls(model, ARGV[2], ARGV[3], ARGV[4])
  for _, prefix in ipairs(handed_over(model)) do
    redis.call('DEL', 'tinsmith:handovers:' .. prefix)
    redis.call('ZREM', 'tinsmith:index:handovers', prefix)
  end
  redis.call('DEL', 'tinsmith:lease:' .. model, 'tinsmith:progress:' .. model, 'tinsmith:recorded:' .. model)
  redis.call('ZREM', 'tinsmith:pending', model)
  redis.call('HDEL', 'tinsmith:pending_queue', model)
end
return {cjson.decode(head[2]), holder, head[5] or 'false'}

-- script: unload flags=allow-oom
-- needs: list_run, now_ms
-- Note that a model's client is done with it: its owner may release the model once no Op waits, until a new Op arrives.
-- ARGV: model id. Returns 0.
local key = 'tinsmith:models:' .. ARGV[1]
if redis.call('EXISTS', key) == 1 then
  redis.call('HSET', key, 'unloaded', now_ms())
  if not redis.call('ZSCORE', 'tinsmith:pending', ARGV[1]) then  -- else a later count takes it off
    list_run(ARGV[1], 'SREM')  -- `admit` lists it again
  end
end
return 0

-- script: unwanted flags=allow-oom
-- List the models that nobody needs in memory: ended models, and models without waiting Ops that are unloaded or whose
-- session has ended. ARGV: model ids. Returns those of these ids.
local found = {}
for _, model in ipairs(ARGV) do
  local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'session_id', 'ended', 'unloaded', 'last_request')
  local unloaded = head[3] and tonumber(head[4] or 0) <= tonumber(head[3])
  local idle = head[1] and not redis.call('ZSCORE', 'tinsmith:pending', model)
                       and (unloaded or redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(head[1])))
  if not head[1] or head[2] or idle then found[#found + 1] = model end
end
return found

-- script: loads flags=allow-oom
-- List the seqs in a slice of a model's journal whose Ops read a checkpoint when they run or are replayed. ARGV: model
-- id, the seq before the slice or '-inf', most entries to read. Returns the seqs; in a full slice then '>' with its last.
local first = ARGV[2] == '-inf' and ARGV[2] or '(' .. ARGV[2]
local seqs = redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. ARGV[1], first, '+inf', 'LIMIT', 0, ARGV[3])
local found = {}
for _, seq in ipairs(seqs) do
  local kind = redis.call('HGET', 'tinsmith:op:' .. ARGV[1] .. ':' .. seq, 'kind')
  if kind == 'create_model' or kind == 'load_weights' then found[#found + 1] = seq end
end
if #seqs == tonumber(ARGV[3]) then found[#found + 1] = '>' .. seqs[#seqs] end
return found

-- script: mark_orphans flags=allow-oom
-- Note when objects were first found without a reference; the first note stays. ARGV: ms, marks... Returns 0.
for i = 2, #ARGV do redis.call('ZADD', 'tinsmith:orphans', 'NX', ARGV[1], ARGV[i]) end
return 0

-- script: claim_orphan flags=allow-oom
-- Claim an orphan, whose files are about to be removed. ARGV: mark. Returns 1, or 0 when it is marked no more.
if not redis.call('ZSCORE', 'tinsmith:orphans', ARGV[1]) then return 0 end
redis.call('ZADD', 'tinsmith:orphans', 0, ARGV[1])
return 1

-- script: use_files flags=allow-oom
-- Unmark an orphan, whose files are about to be used. ARGV: mark. Returns 1, or 0 while it is claimed for its removal.
if redis.call('ZSCORE', 'tinsmith:orphans', ARGV[1]) == '0' then return 0 end
redis.call('ZREM', 'tinsmith:orphans', ARGV[1])
return 1

-- script: give_up_adapters flags=allow-oom
-- needs: affinity, now_ms
-- Give up the adapters of sampling sessions that nothing uses: without unfinished requests, made and last used long ago,
-- and in the object store. New requests for them are refused. A process of an earlier version notes no use, but it
-- leaves the affinity of an adapter for an hour. ARGV: ms since the last use, sampler ids. Returns the ids given up.
local given_up, before = {}, now_ms() - ARGV[1]
redis.call('ZREMRANGEBYSCORE', 'tinsmith:samplers_used', '-inf', '(' .. string.format('%.0f', before))
for i = 2, #ARGV do
  local id, key = ARGV[i], 'tinsmith:samplers:' .. ARGV[i]
  local found = redis.call('HMGET', key, 'prefix', 'created', 'given_up')
  local prefix = found[1] and cjson.decode(found[1])
  if prefix and not found[3] and found[2] * 1000 < before
     and not redis.call('ZSCORE', 'tinsmith:samplers_used', id)
     and redis.call('EXISTS', 'tinsmith:sampled:' .. id, 'tinsmith:handovers:' .. prefix) == 0
     and redis.call('EXISTS', affinity_key(id .. ':0', prefix)) == 0 then
    redis.call('HSET', key, 'given_up', now_ms())
    given_up[#given_up + 1] = id
  end
end
return given_up

-- script: adapters flags=no-writes
-- List the sampling sessions that a run saved an adapter for, without a path, in a slice of those of its session.
-- ARGV: run, the slice's first and last id as of ZRANGEBYLEX, most ids to read.
-- Returns {sampling session, prefix of its adapter, or '' once it was given up, ...}; of a full slice then its last id.
local prefix, found = 'models/' .. ARGV[1] .. '/', {}
local ids = redis.call('ZRANGEBYLEX', 'tinsmith:index:samplers', ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
for _, id in ipairs(ids) do
  local head = redis.call('HMGET', 'tinsmith:samplers:' .. id, 'prefix', 'model_path', 'given_up')
  local saved = cjson.decode(head[1] or '""')
  if saved:sub(1, #prefix) == prefix and cjson.decode(head[2] or '""') == '' then
    found[#found + 1] = id
    found[#found + 1] = head[3] and '' or saved
  end
end
if #ids == tonumber(ARGV[4]) then found[#found + 1] = ids[#ids] end
return found

-- part: end_sampler
-- needs: affinity
-- Remove a sampler's record, and the affinity of its adapter unless the adapter is a checkpoint with a path, which other
-- samplers may use. A copy of the record stays for `keep_s` seconds, because requests that still run count their usage
-- by it.
local function end_sampler(id, keep_s)
  local key, copy = 'tinsmith:samplers:' .. id, 'tinsmith:ended_samplers:' .. id
  local found = redis.call('HMGET', key, 'prefix', 'model_path')
  if cjson.decode(found[2] or '""') == '' then
    redis.call('DEL', affinity_key(id .. ':0', cjson.decode(found[1] or '""')))
  end
  redis.call('RENAME', key, copy)
  redis.call('EXPIRE', copy, keep_s)
  redis.call('ZREM', 'tinsmith:index:samplers', id)
  redis.call('ZREM', 'tinsmith:samplers_used', id)
end

-- part: end_retired
-- needs: end_sampler, is_retired
-- End a sampler whose session ended at least `least` ms ago (or '' to end it in any case). Returns false when the sampler
-- does not exist, or when its session is open again.
local function end_retired(id, least, keep_s)
  local session = redis.call('HGET', 'tinsmith:samplers:' .. id, 'session_id')
  if not session or least ~= '' and not is_retired(session, least) then return false end
  end_sampler(id, keep_s)
  return true
end

-- script: end_sampler flags=allow-oom
-- needs: end_retired
-- End a sampler. ARGV: sampler id, ms since which its session must have ended (or '' to end it in any case), seconds to
-- keep the copy of its record. Returns 1, or 0 when the sampler does not exist, or when its session is open again.
return end_retired(ARGV[1], ARGV[2], ARGV[3]) and 1 or 0

-- script: end_samplers flags=allow-oom
-- needs: end_retired
-- End samplers as `end_sampler` does. ARGV: ms since which their session must have ended (or ''), seconds to keep the
-- copies of their records, sampler ids. Returns 1.
for i = 3, #ARGV do end_retired(ARGV[i], ARGV[1], ARGV[2]) end
return 1

-- script: use_sampler flags=allow-oom
-- needs: now_ms
-- Note that a sampler is about to be used, also before it is made. ARGV: sampler id, ms without a use after which it may
-- end. Returns 1 if it exists, else 0.
-- Each write waits for the disk: a note is renewed once half of that time has passed.
local used, now = redis.call('ZSCORE', 'tinsmith:samplers_used', ARGV[1]), now_ms()
if not used or now - used > ARGV[2] / 2 then redis.call('ZADD', 'tinsmith:samplers_used', now, ARGV[1]) end
return redis.call('EXISTS', 'tinsmith:samplers:' .. ARGV[1])

-- script: end_unused_samplers flags=allow-oom
-- needs: end_sampler, now_ms
-- End the samplers that nothing uses: without unfinished requests, and made and last used long ago. ARGV: ms since the
-- last use, seconds to keep the copies of their records, sampler ids. Returns the number of samplers ended.
local ended, before = 0, now_ms() - ARGV[1]
redis.call('ZREMRANGEBYSCORE', 'tinsmith:samplers_used', '-inf', '(' .. string.format('%.0f', before))
for i = 3, #ARGV do
  local id = ARGV[i]
  local created = redis.call('HGET', 'tinsmith:samplers:' .. id, 'created')
  if created and created * 1000 < before and not redis.call('ZSCORE', 'tinsmith:samplers_used', id)
     and redis.call('EXISTS', 'tinsmith:sampled:' .. id) == 0 then
    end_sampler(id, ARGV[2])
    ended = ended + 1
  end
end
return ended
