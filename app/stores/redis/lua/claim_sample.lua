#!lua flags=allow-oom
-- Start on a sampling request; one that another worker left running had an attempt. ARGV: request id, worker
-- ("node/boot"), lease in ms, the most attempts it may have had or ''.
-- Returns {attempts, ms since admission, adapter or false}; {} when it is terminal, 0 while another worker runs it, or 1
-- when it had more attempts.
local op = 'tinsmith:op:' .. ARGV[1]
if redis.call('EXISTS', op) == 0 then return {} end
if not redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[2], 'NX', 'PX', ARGV[3]) then return 0 end
local runner = redis.call('HGET', op, 'runner')
if runner and runner ~= ARGV[2] then redis.call('HINCRBY', op, 'attempts', 1) end
if ARGV[4] ~= '' and tonumber(redis.call('HGET', op, 'attempts')) > tonumber(ARGV[4]) then
  redis.call('HDEL', op, 'runner')
  redis.call('DEL', 'tinsmith:lease:' .. ARGV[1])
  return 1
end
redis.call('HSET', op, 'runner', ARGV[2])
local found = redis.call('HMGET', op, 'attempts', 'admitted', 'adapter')
local node = ARGV[2]:match('^(.*)/')
local before = place(ARGV[1], redis.call('HGET', 'tinsmith:pending_queue', ARGV[1]), node)
local key = home_of(ARGV[1], found[3])
-- A home that did not take what it was rung for loses it to whoever did.
local home = redis.call('GET', key)
if not home or (home == before and node ~= before) then redis.call('SET', key, node, 'PX', HOME_MS) end
return {tonumber(found[1]), now_ms() - found[2], found[3]}
