#!lua flags=allow-oom
-- Cancel a sampling request, unless it has a result. ARGV: request id, seconds to keep, type and body of its result.
-- Returns 1, or 0 when it had a result already.
return abort_sample(ARGV[1], ARGV[2], ARGV[3], ARGV[4]) and 1 or 0
