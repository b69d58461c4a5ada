#!lua flags=allow-oom
-- Read a payer's usage of its limits. ARGV: its kind, its id, its limits of calls and of tokens per second, or ''.
-- Returns {live models, bytes of checkpoints, unfinished sequences, calls per second, tokens per second}; both rates
-- are text, '' without a limit.
local payer = {kind = ARGV[1], id = ARGV[2], name = ARGV[1] .. ':' .. ARGV[2]}
local now = now_ms()

local function average(rate, limit)
  return limit == '' and '' or tostring(missing(payer, rate, tonumber(limit), now) / BURST_S)
end

return {live_models(payer), bytes_stored(payer),
        tonumber(redis.call('HGET', 'tinsmith:sampling_of', payer.name) or 0),
        average('requests', ARGV[3]), average('tokens', ARGV[4])}
