-- Decides requests against their leaky buckets, all in one atomic step.
--
-- A request's buckets are a group; a call carries one group or several, which
-- are decided one after the other. Every number is an integer below 2^53, the
-- last that a double holds exactly; times are microseconds.
--
-- KEYS   the buckets' keys, group after group
-- ARGV   for each group: how many buckets it has, and 1 if each bucket that
--        has room is charged even if another denies, 0 if all are or none;
--        then for each bucket: size, drip rate, drip size, cost, and 1 if the
--        size may differ from request to request, else 0; or 2 more, and then
--        a time until it runs empty and a slack that it has at least: it was
--        charged elsewhere while this server could not be asked
-- reply  for each bucket: the time until it runs empty, t, or -1 - t if its key
--        held something else than a bucket; and its slack, s, or -1 - s if it
--        denies
--
-- A key holds the time at which its bucket runs empty, and behind a colon the
-- slack, if there is any: the units by which the last drip before that time
-- falls short of a full one. The key expires when the bucket is empty, never
-- before. limit.go has the same arithmetic in Go.

local floor, ceil, format, match = math.floor, math.ceil, string.format, string.match

local HORIZON = 2 ^ 50    -- further ahead no bucket's time can lie
local STEP_BACK = 1000000 -- further ahead than a full bucket by this: the clock was set back

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local reply, key, arg = {}, 0, 1
while ARGV[arg] do
  local buckets, each = tonumber(ARGV[arg]), ARGV[arg + 1] == '1'
  arg = arg + 2

  -- What each bucket holds, and what it would hold with the request in it.
  local admitted = true
  local holds, slacks, fits, filled, left, changed, foreign = {}, {}, {}, {}, {}, {}, {}
  for i = 1, buckets do
    local size, rate, drip = tonumber(ARGV[arg]), tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
    local cost, flags = tonumber(ARGV[arg + 3]), tonumber(ARGV[arg + 4])
    local varies, owed = flags % 2 == 1, flags >= 2
    arg = arg + 5

    local clear, slack = now, 0
    local value = redis.pcall('GET', KEYS[key + i])
    if type(value) == 'string' then
      -- What is no bucket of ours is an empty one; the next charge replaces it.
      local c, s = match(value, '^%d+$'), '0'
      if not c then
        c, s = match(value, '^(%d+):(%d+)$')
      end
      c, s = tonumber(c), tonumber(s)
      if not c or c - now > HORIZON or s >= drip then
        foreign[i] = true
      elseif c > now then
        clear, slack = c, s
      end
      local drips = ceil(size / drip)
      if not varies and clear - now > drips * rate + STEP_BACK then
        clear, slack, changed[i] = now + drips * rate, drips * drip - size, true
      end
    elseif value then
      if not match(value.err, '^WRONGTYPE') then
        return value
      end
      foreign[i] = true
    end
    if owed then
      local c, s = now + tonumber(ARGV[arg]), tonumber(ARGV[arg + 1])
      arg = arg + 2
      -- It was told with some delay: less than half a drip apart is the same.
      local apart = 2 * (c - clear)
      if clear == now or apart >= rate then
        clear, slack, changed[i] = c, s, true
      elseif apart > -rate and s < slack then
        slack, changed[i] = s, true
      end
    end

    fits[i] = cost <= size and clear - now <= floor((size - cost + slack) / drip) * rate
    admitted = admitted and fits[i]
    holds[i], slacks[i] = clear, slack
    if fits[i] then
      local drips = ceil((cost - slack) / drip)
      filled[i], left[i] = clear + drips * rate, slack + drips * drip - cost
    end
  end

  for i = 1, buckets do
    local clear, slack = holds[i], slacks[i]
    if fits[i] and (admitted or each) then
      clear, slack, changed[i] = filled[i], left[i], true
    end
    if changed[i] then
      local value = slack == 0 and format('%.0f', clear) or format('%.0f:%.0f', clear, slack)
      redis.call('SET', KEYS[key + i], value, 'PXAT', format('%.0f', ceil(clear / 1000)))
    end
    reply[#reply + 1] = foreign[i] and now - clear - 1 or clear - now
    reply[#reply + 1] = fits[i] and slack or -1 - slack
  end
  key = key + buckets
end
return reply
