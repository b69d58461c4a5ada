-- Sessions: the lists of a project's sessions, and the count of those that have not ended.

-- part: list_owned
-- Put a session or a run ('session', 'model') on its project's list, by the time of its creation, and take it off that
-- of its former project. Returns its project, or nil for a record that is gone, and that former project, if there is one.
local function list_owned(kind, id)
  local found = redis.call('HMGET', 'tinsmith:' .. kind .. 's:' .. id, 'owner', 'created')
  local owner = found[1] and cjson.decode(found[1]) or nil
  local owners, lists = 'tinsmith:' .. kind .. '_owners', 'tinsmith:' .. kind .. 's_of:'
  local former = redis.call('HGET', owners, id)
  if owner then
    redis.call('ZADD', lists .. owner, found[2], id)
    redis.call('HSET', owners, id, owner)
  else
    redis.call('HDEL', owners, id)
  end
  if not former or former == owner then return owner, nil end
  redis.call('ZREM', lists .. former, id)
  return owner, former
end

-- part: list_session
-- needs: list_owned
-- Put a session on its project's list, and while it has not ended on the lists of live sessions of its project and its
-- key. Take it off all other lists.
local function list_session(id)
  local owner, former = list_owned('session', id)
  if former then redis.call('SREM', 'tinsmith:sessions_live:project:' .. former, id) end
  if not owner then return end
  local how = redis.call('ZSCORE', 'tinsmith:sessions_heard', id) and 'SADD' or 'SREM'
  redis.call(how, 'tinsmith:sessions_live:project:' .. owner, id)
  local key = redis.call('HGET', 'tinsmith:sessions:' .. id, 'key')
  if key then redis.call(how, 'tinsmith:sessions_live:key:' .. cjson.decode(key), id) end
end

-- part: live_sessions
-- needs: count_live
local function live_sessions(payer, most)
  local function is_heard(id) return redis.call('ZSCORE', 'tinsmith:sessions_heard', id) end
  return count_live('tinsmith:sessions_live:' .. payer.name, is_heard, most)
end

-- script: open_session
-- needs: hear, no_room, now_ms, take
-- Charge for a new session and open it; one that exists does not change. ARGV: session id, charge (or ''), field,
-- value, ... Returns {}, or the refusal of `over_limit` in limits.lua.
if redis.call('EXISTS', 'tinsmith:sessions:' .. ARGV[1]) == 1 then return {} end
local refusal = no_room(0)
if refusal then return refusal end
local limited = ARGV[2] ~= '' and take(cjson.decode(ARGV[2]))
if limited then return limited end
redis.call('HSET', 'tinsmith:sessions:' .. ARGV[1], unpack(ARGV, 3))
redis.call('ZADD', 'tinsmith:index:sessions', 0, ARGV[1])
hear(cjson.encode(ARGV[1]), now_ms())
return {}

-- script: relist_runs flags=allow-oom
-- needs: list_owned, list_run, live_runs
-- Correct the lists that runs are on. ARGV: ids of runs that are there or gone. Returns 0.
for _, id in ipairs(ARGV) do
  list_owned('model', id)
  list_run(id, is_live(id) and 'SADD' or 'SREM')
end
return 0

-- script: relist_sessions flags=allow-oom
-- needs: list_session
-- Correct the lists that sessions are on. ARGV: session ids, of sessions that are there or gone. Returns 0.
for _, id in ipairs(ARGV) do list_session(id) end
return 0
