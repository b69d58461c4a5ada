#!lua flags=allow-oom
-- What a payer has and takes. ARGV: its kind, its id, the limits of its calls and tokens a second, or ''.
-- Returns {live models, bytes of checkpoints, sequences being sampled, calls a second (as text; '' without a limit), tokens}
local payer = {kind = ARGV[1], id = ARGV[2], name = ARGV[1] .. ':' .. ARGV[2]}
local now = now_ms()

local function average(rate, limit)
  return limit == '' and '' or tostring(missing(payer, rate, tonumber(limit), now) / BURST_S)
end

return {live_models(payer), bytes_stored(payer),
        tonumber(redis.call('HGET', 'tinsmith:sampling_of', payer.name) or 0),
        average('requests', ARGV[3]), average('tokens', ARGV[4])}
