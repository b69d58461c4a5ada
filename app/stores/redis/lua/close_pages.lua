#!lua flags=allow-oom
-- Close the pages of past hours: nothing is written to them any more, whatever the clock says later. ARGV: most pages.
-- Returns so many closed pages, "<book>/<project>/<hour>" each, the oldest first.
local closed = math.max(pages_closed(), hour_now() - 1)
redis.call('SET', 'tinsmith:pages_closed', closed)
return redis.call('ZRANGEBYSCORE', 'tinsmith:pages', '-inf', closed, 'LIMIT', 0, ARGV[1])
