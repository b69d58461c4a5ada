#!lua flags=allow-oom
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
  rows[#rows + 1] = redis.call('HSTRLEN', future, 'body')
end
return rows
