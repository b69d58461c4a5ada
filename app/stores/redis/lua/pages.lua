-- Hourly pages of usage and of the audit log (app/stores/pages.py).

-- part: pages
-- needs: now_ms
-- The last hour whose pages are closed; -1 while no page is closed.
local function pages_closed()
  return tonumber(redis.call('GET', 'tinsmith:pages_closed') or -1)
end

local function hour_now()
  return math.floor(now_ms() / 3600000)
end

-- The key of a project's page of a ledger for an hour; for a closed hour, of the first page that is still open.
local function page_of(ledger, project, hour)
  hour = math.max(hour, pages_closed() + 1)
  local name = ledger .. '/' .. project .. '/' .. hour
  redis.call('ZADD', 'tinsmith:pages', hour, name)
  return 'tinsmith:page:' .. name
end

-- part: month
-- The number of an hour's month (UTC), counted from January 1970, by the usual conversion of days to dates of a calendar
-- whose years begin in March.
local function month_of(hour)
  local day = math.floor(hour / 24) + 719468
  local era = math.floor(day / 146097)
  local of_era = day % 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  return (era * 400 + year - 1970) * 12 + math.floor((5 * of_year + 2) / 153) + 2
end

-- The key of a project's usage in the month of an hour: amounts by "<kind> <base model>". The budget is compared with it.
local function month_key(project, hour)
  return 'tinsmith:month:' .. project .. '/' .. month_of(hour)
end

local MONTH_KEPT_S = 62 * 24 * 3600

-- Add an amount to a project's month. As floats: a month of byte-seconds has more than 63 bits.
local function count_month(project, hour, name, amount)
  local key = month_key(project, hour)
  redis.call('HINCRBYFLOAT', key, name, amount)
  redis.call('EXPIRE', key, MONTH_KEPT_S)
end

-- part: count_usage
-- needs: month, pages
-- Count the usage of an Op or a sample for the project that owns its model or sampler (`record` is that record's key)
-- now, for the session and, with a `run`, for this run. `usage`: JSON, amounts by kind. The page stores the user of every
-- session on it, because the session's own record is deleted some day.
local function count_usage(record, run, usage)
  local found = usage ~= '{}' and redis.call('HMGET', record, 'owner', 'session_id', 'base_model')
  if not found or not found[1] then return end
  local project, session, base = cjson.decode(found[1]), cjson.decode(found[2]), cjson.decode(found[3])
  local hour = hour_now()
  local page = page_of('usage', project, hour)
  for kind, amount in pairs(cjson.decode(usage)) do
    redis.call('HINCRBY', page, kind .. ' ' .. session .. ' ' .. base, amount)
    if run then redis.call('HINCRBY', page, 'run ' .. kind .. ' ' .. run .. ' ' .. base, amount) end
    count_month(project, hour, kind .. ' ' .. base, amount)
  end
  if redis.call('HEXISTS', page, 'session ' .. session) == 0 then
    local about = redis.call('HMGET', 'tinsmith:sessions:' .. session, 'user', 'user_metadata')
    local text = '{"user": ' .. (about[1] or '""') .. ', "user_metadata": ' .. (about[2] or '{}') .. '}'
    redis.call('HSET', page, 'session ' .. session, text)
  end
end

-- script: note flags=allow-oom
-- needs: no_room, now_ms, pages
-- Write an entry to this hour's page of a project's ledger; an existing entry stays. ARGV: ledger, project, entry id,
-- text, 'urgent' for an entry that is written even without room. The stored value is the time in ms, a space and the
-- text. Returns 1, or 0 when the entry exists.
local refusal = ARGV[5] ~= 'urgent' and no_room(0)
if refusal then return refusal end
local page = page_of(ARGV[1], ARGV[2], hour_now())
return redis.call('HSETNX', page, ARGV[3], string.format('%.0f ', now_ms()) .. ARGV[4])

-- script: close_pages flags=allow-oom
-- needs: pages
-- Close the pages of past hours: nothing is written to them any more, whatever the clock says later. ARGV: most pages.
-- Returns closed pages, "<ledger>/<project>/<hour>" each, the oldest first.
local closed = math.max(pages_closed(), hour_now() - 1)
redis.call('SET', 'tinsmith:pages_closed', closed)
return redis.call('ZRANGEBYSCORE', 'tinsmith:pages', '-inf', closed, 'LIMIT', 0, ARGV[1])

-- script: month_usage flags=allow-oom
-- needs: month, pages
-- Read a project's usage of this month. ARGV: project. Returns name, amount, ...
return redis.call('HGETALL', month_key(ARGV[1], hour_now()))

-- script: refill_month
-- needs: month
-- Raise a project's usage of one month to the sum of its pages, after the state server lost it. ARGV: project, first hour
-- of the month, first hour behind it, JSON list of the hours whose pages are in the object store, JSON of the amounts on
-- these by "<kind> <base model>". A page that is here too does not count. Returns the number of amounts that were raised.
local project, first, stop = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local stored, amounts = {}, cjson.decode(ARGV[5])
for _, hour in ipairs(cjson.decode(ARGV[4])) do stored[hour] = true end
for hour = first, stop - 1 do
  local found = stored[hour] and {} or redis.call('HGETALL', 'tinsmith:page:usage/' .. project .. '/' .. hour)
  for i = 1, #found, 2 do
    local kind, base = found[i]:match('^(%S+) %S* (.+)$')
    if kind and kind ~= 'run' then amounts[kind .. ' ' .. base] = (amounts[kind .. ' ' .. base] or 0) + found[i + 1] end
  end
end
local key, raised = month_key(project, first), 0
for name, amount in pairs(amounts) do
  if amount > tonumber(redis.call('HGET', key, name) or 0) then
    redis.call('HSET', key, name, string.format('%.17g', amount))
    redis.call('EXPIRE', key, MONTH_KEPT_S)
    raised = raised + 1
  end
end
return raised

-- script: measure_storage flags=allow-oom
-- needs: month, pages
-- Add the storage that checkpoints took between two measurements to the usage pages, once. ARGV: time of the last
-- measurement ('' for none), time of this one, JSON list of {project, base model, hour, byte-seconds as text}.
-- Returns 1, or 0 when another measurement was the last one.
if (redis.call('GET', 'tinsmith:storage_measured') or '') ~= ARGV[1] then return 0 end
redis.call('SET', 'tinsmith:storage_measured', ARGV[2])
for _, held in ipairs(cjson.decode(ARGV[3])) do
  redis.call('HINCRBY', page_of('usage', held[1], held[3]), 'storage  ' .. held[2], held[4])
  count_month(held[1], held[3], 'storage ' .. held[2], held[4])
end
return 1
