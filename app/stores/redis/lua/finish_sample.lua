#!lua flags=allow-oom
-- Make a sample's result readable; the first one stays. ARGV: request id, state, type, body, seconds to keep.
-- Returns 1, or 0 when there was a result already.
return close_sample(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]) and 1 or 0
