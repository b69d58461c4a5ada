-- Records: each is a hash, listed in its namespace's index.

-- part: now_ms
-- The state server's time in ms. No other clock is used, so no two clocks are ever compared.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- part: change_record
-- needs: list_owned, list_run, list_session, stored
-- Make, change or delete a record by `change`. A checkpoint, its bytes, and a run move in the counts and lists from the
-- owner before the change to the owner after it; a session moves in the lists.
local function change_record(namespace, id, change)
  if namespace == 'checkpoints' then
    sum_stored()
    add_stored(id, -1)
    change()
    add_stored(id, 1)
  elseif namespace == 'models' then
    list_run(id, 'SREM')
    change()
    list_run(id, 'SADD')
    list_owned('model', id)
  else
    change()
    if namespace == 'sessions' then list_session(id) end
  end
end

-- script: put flags=allow-oom
-- needs: change_record
-- Set a record. ARGV: namespace, id, ms to live or 0, field, value, ... Returns 1.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
change_record(ARGV[1], ARGV[2], function() redis.call('HSET', key, unpack(ARGV, 4)) end)
if ARGV[3] ~= '0' then redis.call('PEXPIRE', key, ARGV[3]) end
redis.call('ZADD', 'tinsmith:index:' .. ARGV[1], 0, ARGV[2])
return 1

-- script: put_new
-- needs: change_record, no_room
-- Set a record unless it exists. ARGV: namespace, id, field, value, ... Returns 1, or 0 when it exists.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('EXISTS', key) == 1 then return 0 end
local refusal = no_room(0)
if refusal then return refusal end
change_record(ARGV[1], ARGV[2], function() redis.call('HSET', key, unpack(ARGV, 3)) end)
redis.call('ZADD', 'tinsmith:index:' .. ARGV[1], 0, ARGV[2])
return 1

-- script: unlist flags=allow-oom
-- Remove a record's id from its index, unless the record was made again. ARGV: namespace, id. Returns 0.
if redis.call('EXISTS', 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]) == 0 then
  redis.call('ZREM', 'tinsmith:index:' .. ARGV[1], ARGV[2])
end
return 0

-- script: note_weights flags=allow-oom
-- Note the id of a base model's weights. ARGV: base model, id or '' for none, 1 to replace another id or 0. Returns the
-- id that was noted before, or '' if there was none.
local noted = redis.call('HGET', 'tinsmith:base_weights', ARGV[1])
if ARGV[2] ~= '' and (not noted or ARGV[3] == '1') then
  redis.call('HSET', 'tinsmith:base_weights', ARGV[1], ARGV[2])
end
return noted or ''

-- script: put_loss
-- needs: no_room
-- Set a custom loss unless it exists, and count its bytes for its session. ARGV: session id, loss id, its bytes, most
-- bytes of a session, field, value, ... Returns 1; 0 when it exists, -1 when it would be too much, -2 without the session.
local key, session = 'tinsmith:losses:' .. ARGV[2], 'tinsmith:sessions:' .. ARGV[1]
if redis.call('EXISTS', key) == 1 then return 0 end
if redis.call('EXISTS', session) == 0 then return -2 end
local refusal = no_room(0)
if refusal then return refusal end
local held = tonumber(redis.call('HGET', session, 'loss_bytes') or 0)
if held + ARGV[3] > tonumber(ARGV[4]) then return -1 end
redis.call('HINCRBY', session, 'loss_bytes', ARGV[3])
redis.call('HSET', key, unpack(ARGV, 5))
redis.call('ZADD', 'tinsmith:index:losses', 0, ARGV[2])
return 1

-- script: put_reserved
-- needs: change_record, no_room, reserved
-- Record a checkpoint that room is reserved for; its bytes count instead of the reservation from now on. Its owner is
-- that of its run, whose session may have been moved meanwhile.
-- ARGV: path, bytes, field, value, ... Returns 1, 0 when it exists, or -1 when this room is not reserved any more.
local key = 'tinsmith:checkpoints:' .. ARGV[1]
if redis.call('EXISTS', key) == 1 then
  end_reservation(ARGV[1])
  return 0
end
local refusal = no_room(0)
if refusal then return refusal end
end_lapsed()
local reservation = end_reservation(ARGV[1])
if not reservation or tonumber(reservation.bytes) < tonumber(ARGV[2]) then return -1 end
local owner = redis.call('HGET', 'tinsmith:models:' .. ARGV[1]:match('^tinker://([^/]*)'), 'owner')
change_record('checkpoints', ARGV[1], function()
  redis.call('HSET', key, unpack(ARGV, 3))
  if owner then redis.call('HSET', key, 'owner', owner) end
end)
redis.call('ZADD', 'tinsmith:index:checkpoints', 0, ARGV[1])
return 1

-- script: put_newer flags=allow-oom
-- Set a record whose version is above the stored version. ARGV: namespace, id, version, field, value, ...
-- Returns 1, or 0 when that version or a later one is stored.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if tonumber(redis.call('HGET', key, 'version') or 0) >= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', key, unpack(ARGV, 4))
redis.call('ZADD', 'tinsmith:index:' .. ARGV[1], 0, ARGV[2])
return 1

-- script: record
-- needs: no_room
-- Keep metrics that a client recorded for a run, each event once. ARGV: model id, then of each event its id (or '') and
-- [step, {name: value}] as JSON. Returns 1, or 0 when the run does not exist or has ended.
local MOST_POINTS = 1000  -- 900 kB a model at most
local KEPT_S = 30 * 24 * 3600  -- after the last of them
local RECENT = 200  -- a client repeats a call of at most 100 events, before its next one
local head = redis.call('HMGET', 'tinsmith:models:' .. ARGV[1], 'owner', 'ended')
if not head[1] or head[2] then return 0 end
local refusal = no_room(0)
if refusal then return refusal end
local key = 'tinsmith:recorded:' .. ARGV[1]
local known = {}
for _, entry in ipairs(redis.call('XREVRANGE', key, '+', '-', 'COUNT', RECENT)) do
  if entry[2][3] == 'event' and entry[2][4] ~= '' then known[entry[2][4]] = true end
end
for i = 2, #ARGV, 2 do
  if not known[ARGV[i]] then
    redis.call('XADD', key, 'MAXLEN', MOST_POINTS, '*', 'point', ARGV[i + 1], 'event', ARGV[i])
  end
end
redis.call('EXPIRE', key, KEPT_S)
return 1

-- script: update flags=allow-oom
-- Set fields of an existing record. ARGV: namespace, id, field, value, ... Returns 1, or 0 when it does not exist.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('EXISTS', key) == 0 then return 0 end
redis.call('HSET', key, unpack(ARGV, 3))
return 1

-- script: update_same flags=allow-oom
-- Set fields of a record in which one field is still the same. ARGV: namespace, id, that field, its value, field, value,
-- ... Returns 1, or 0 when the record is different or does not exist.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
if redis.call('HGET', key, ARGV[3]) ~= ARGV[4] then return 0 end
redis.call('HSET', key, unpack(ARGV, 5))
return 1

-- script: delete flags=allow-oom
-- needs: change_record
-- Delete a record. ARGV: namespace, id. Returns 0.
-- A process of an earlier version leaves the progress of a run that it ends.
if ARGV[1] == 'models' then
  redis.call('DEL', 'tinsmith:progress:' .. ARGV[2], 'tinsmith:recorded:' .. ARGV[2])
end
change_record(ARGV[1], ARGV[2], function()
  redis.call('DEL', 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2])
  redis.call('ZREM', 'tinsmith:index:' .. ARGV[1], ARGV[2])
end)
return 0

-- script: delete_same flags=allow-oom
-- needs: change_record
-- Delete a record that still has these fields. ARGV: namespace, id, field, value, ...
-- Returns 1, or 0 when the record is different.
local key = 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2]
for i = 3, #ARGV, 2 do
  if redis.call('HGET', key, ARGV[i]) ~= ARGV[i + 1] then return 0 end
end
change_record(ARGV[1], ARGV[2], function()
  redis.call('DEL', key)
  redis.call('ZREM', 'tinsmith:index:' .. ARGV[1], ARGV[2])
end)
return 1

-- script: delete_older flags=allow-oom
-- needs: change_record, now_ms, pages
-- Delete a project's checkpoints that are older than others, and note each in its audit log. Nothing happens if one of
-- these checkpoints, older or newer, has changed since it was read. ARGV: project, the newer ones, the older ones, as
-- JSON: {path, its FIELDS, key and text of its entry}, where a newer one has no entry. Returns 1, or 0 after a change.
local FIELDS = {'owner', 'prefix', 'public', 'expires_at', 'expiry_by'}
local newer, older = cjson.decode(ARGV[2]), cjson.decode(ARGV[3])
for _, checkpoints in ipairs({newer, older}) do
  for _, checkpoint in ipairs(checkpoints) do
    local found = redis.call('HMGET', 'tinsmith:checkpoints:' .. checkpoint[1], unpack(FIELDS))
    for i, was in ipairs(checkpoint[2]) do
      if (found[i] or '') ~= was then return 0 end
    end
  end
end
local page, time = page_of('audit', ARGV[1], hour_now()), string.format('%.0f ', now_ms())
for _, checkpoint in ipairs(older) do
  redis.call('HSET', page, checkpoint[3], time .. checkpoint[4])
  change_record('checkpoints', checkpoint[1], function()
    redis.call('DEL', 'tinsmith:checkpoints:' .. checkpoint[1])
    redis.call('ZREM', 'tinsmith:index:checkpoints', checkpoint[1])
  end)
end
return 1

-- script: join flags=allow-oom
-- needs: now_ms
-- Add a client to a sampling session. ARGV: sampler id. Returns the client's number, from 1; 0 without such a session.
local key = 'tinsmith:samplers:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then return 0 end
redis.call('ZADD', 'tinsmith:samplers_used', now_ms(), ARGV[1])
return redis.call('HINCRBY', key, 'joined', 1)

-- part: readable_slice
-- Find the checkpoints in a slice of the index that are public, or owned by one of the projects. A script passes over the
-- others, so that they cost hardly any time: it would tell a stranger how many there are. `argv`: the slice's first and
-- last path as of ZRANGEBYLEX, most paths to read, projects as JSON; `names`: of fields. Returns of each {path, field, ...},
-- and the last path of a full slice or ''.
local function readable_slice(argv, names)
  local projects, found = {}, {}
  for i = 4, #argv do projects[argv[i]] = true end
  local paths = redis.call('ZRANGEBYLEX', 'tinsmith:index:checkpoints', argv[1], argv[2], 'LIMIT', 0, argv[3])
  for _, path in ipairs(paths) do
    local held = redis.call('HMGET', 'tinsmith:checkpoints:' .. path, 'owner', 'public', unpack(names))
    if held[2] == 'true' or (held[1] and projects[held[1]]) then found[#found + 1] = {path, unpack(held, 3)} end
  end
  return found, #paths == tonumber(argv[3]) and paths[#paths] or ''
end

-- script: readable_checkpoints flags=no-writes
-- needs: readable_slice
-- Read a slice's readable checkpoints. ARGV: as readable_slice. Returns the last path of a full slice or '', then path, its
-- fields and values, path, ...
local readable, last = readable_slice(ARGV, {})
local found = {last}
for _, one in ipairs(readable) do
  found[#found + 1] = one[1]
  found[#found + 1] = redis.call('HGETALL', 'tinsmith:checkpoints:' .. one[1])
end
return found

-- script: newest_checkpoints flags=no-writes
-- needs: now_ms, readable_slice
-- Read the newest of a slice's readable checkpoints of each kind, without the expired ones. ARGV: as readable_slice.
-- Returns the same as readable_checkpoints.
local readable, last = readable_slice(ARGV, {'kind', 'created', 'expires_at'})
local newest, now = {}, now_ms() / 1000
for _, one in ipairs(readable) do
  local path, kind, created, expires_at = one[1], one[2], tonumber(one[3]), tonumber(one[4])
  local is_newer = not newest[kind] or created > newest[kind].created
  if is_newer and not (expires_at and expires_at <= now) then newest[kind] = {path = path, created = created} end
end
local found = {last}
for _, one in pairs(newest) do
  found[#found + 1] = one.path
  found[#found + 1] = redis.call('HGETALL', 'tinsmith:checkpoints:' .. one.path)
end
return found

-- script: size_of_checkpoints flags=no-writes
-- needs: readable_slice
-- Count a slice's readable checkpoints and their bytes. ARGV: as readable_slice. Returns the last path of a full slice or
-- '', their number, their bytes.
local readable, last = readable_slice(ARGV, {'size_bytes'})
local size = 0
for _, one in ipairs(readable) do size = size + one[2] end
return {last, #readable, string.format('%.0f', size)}

-- script: read_fields flags=no-writes
-- Read some fields of records. ARGV: namespace, number of the fields, their names, ids. Returns the values of each id in
-- turn, false for a missing one.
local names, found = {unpack(ARGV, 3, 2 + ARGV[2])}, {}
for i = 3 + ARGV[2], #ARGV do
  for _, value in ipairs(redis.call('HMGET', 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[i], unpack(names))) do
    found[#found + 1] = value
  end
end
return found

-- script: key_and_user flags=no-writes
-- Read an API key and its user, since every request of an account needs both. ARGV: key id. Returns the fields and values
-- of the key, and those of its user; of each none if there is none.
local key = 'tinsmith:keys:' .. ARGV[1]
local user = redis.call('HGET', key, 'user')
return {redis.call('HGETALL', key), user and redis.call('HGETALL', 'tinsmith:users:' .. cjson.decode(user)) or {}}

-- script: relist flags=allow-oom
-- needs: stored
-- Correct a project's list of checkpoints. ARGV: project, paths that may belong on the list or not. Returns 1.
sum_stored()
for i = 2, #ARGV do
  local owner = redis.call('HGET', 'tinsmith:checkpoints:' .. ARGV[i], 'owner')
  local is_its = owner and cjson.decode(owner) == ARGV[1]
  redis.call(is_its and 'SADD' or 'SREM', checkpoints_of(ARGV[1]), ARGV[i])
end
return 1

-- script: mark flags=allow-oom
-- Write something, so that WAIT waits for all that was written before it. Returns the number of marks.
return redis.call('INCR', 'tinsmith:marks')
