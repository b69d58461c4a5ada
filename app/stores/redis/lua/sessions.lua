-- Sessions: the lists of a project's sessions, and the count of those that have not ended.

-- part: list_session
-- Put a session on its project's list, by the time of its creation, and while it has not ended on the lists of live
-- sessions of its project and its key. Take it off all other lists.
local function list_session(id)
  local found = redis.call('HMGET', 'tinsmith:sessions:' .. id, 'owner', 'created', 'key')
  local owner = found[1] and cjson.decode(found[1])
  local former = redis.call('HGET', 'tinsmith:session_owners', id)
  if former and former ~= owner then
    redis.call('ZREM', 'tinsmith:sessions_of:' .. former, id)
    redis.call('SREM', 'tinsmith:sessions_live:project:' .. former, id)
    redis.call('HDEL', 'tinsmith:session_owners', id)
  end
  if not owner then return end
  redis.call('ZADD', 'tinsmith:sessions_of:' .. owner, found[2], id)
  redis.call('HSET', 'tinsmith:session_owners', id, owner)
  local how = redis.call('ZSCORE', 'tinsmith:sessions_heard', id) and 'SADD' or 'SREM'
  redis.call(how, 'tinsmith:sessions_live:project:' .. owner, id)
  if found[3] then redis.call(how, 'tinsmith:sessions_live:key:' .. cjson.decode(found[3]), id) end
end

-- part: live_sessions
-- The number of a payer's sessions that have not ended. Others leave its list; `hear` adds one that is open again.
local function live_sessions(payer)
  local listed, live = 'tinsmith:sessions_live:' .. payer.name, 0
  for _, id in ipairs(redis.call('SMEMBERS', listed)) do
    if redis.call('ZSCORE', 'tinsmith:sessions_heard', id) then
      live = live + 1
    else
      redis.call('SREM', listed, id)
    end
  end
  return live
end

-- script: open_session
-- needs: hear, no_room, now_ms, take
-- Charge for a new session and open it. ARGV: session id, charge (or ''), field, value, ...
-- Returns {}, or the refusal of `over_limit` in limits.lua.
local refusal = no_room(0)
if refusal then return refusal end
local limited = ARGV[2] ~= '' and take(cjson.decode(ARGV[2]))
if limited then return limited end
redis.call('HSET', 'tinsmith:sessions:' .. ARGV[1], unpack(ARGV, 3))
redis.call('ZADD', 'tinsmith:index:sessions', 0, ARGV[1])
hear(cjson.encode(ARGV[1]), now_ms())
return {}

-- script: relist_sessions flags=allow-oom
-- needs: list_session
-- Correct the lists that sessions are on. ARGV: session ids, of sessions that are there or gone. Returns 0.
for _, id in ipairs(ARGV) do list_session(id) end
return 0
