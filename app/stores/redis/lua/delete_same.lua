#!lua flags=allow-oom
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
