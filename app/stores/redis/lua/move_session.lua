#!lua flags=allow-oom
-- Move a session, with its models, samplers, losses and checkpoints, to another project.
-- ARGV: session id, project as JSON.
local key = 'tinsmith:sessions:' .. ARGV[1]
if redis.call('EXISTS', key) == 0 then return 0 end
redis.call('HSET', key, 'owner', ARGV[2])

local function move(namespace, prefix)
  for _, id in ipairs(redis.call('ZRANGEBYLEX', 'tinsmith:index:' .. namespace, '[' .. prefix, '(' .. prefix .. '\255')) do
    local record = 'tinsmith:' .. namespace .. ':' .. id
    if redis.call('EXISTS', record) == 1 then
      change_record(namespace, id, function() redis.call('HSET', record, 'owner', ARGV[2]) end)
    end
  end
end

move('models', ARGV[1] .. ':train:')
move('samplers', ARGV[1] .. ':sample:')
move('losses', ARGV[1] .. ':loss:')
move('checkpoints', 'tinker://' .. ARGV[1] .. ':train:')
return 1
