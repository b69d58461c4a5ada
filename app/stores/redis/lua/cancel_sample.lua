#!lua flags=allow-oom
-- End a sampling request that nobody waits for any more, unless it has a result. ARGV: request id, seconds to keep,
-- type and body of its result. Returns 1, or 0 when there was a result already.
return abort_sample(ARGV[1], ARGV[2], ARGV[3], ARGV[4]) and 1 or 0
