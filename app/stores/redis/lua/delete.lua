#!lua flags=allow-oom
-- Delete a record. ARGV: namespace, id.
change_record(ARGV[1], ARGV[2], function()
  redis.call('DEL', 'tinsmith:' .. ARGV[1] .. ':' .. ARGV[2])
  redis.call('ZREM', 'tinsmith:index:' .. ARGV[1], ARGV[2])
end)
return 0
