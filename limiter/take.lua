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
--        size may differ from request to request, else 0
-- reply  for each bucket: the time until it runs empty, and its slack, or
--        -1 - slack if it denies
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
  local holds, slacks, fits, filled, left, changed = {}, {}, {}, {}, {}, {}
  for i = 1, buckets do
    local size, rate, drip = tonumber(ARGV[arg]), tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
    local cost, varies = tonumber(ARGV[arg + 3]), ARGV[arg + 4] == '1'
    arg = arg + 5

    local clear, slack = now, 0
    local value = redis.pcall('GET', KEYS[key + i])
    if type(value) == 'string' then
      -- What is no bucket of ours is an empty one; the next charge replaces it.
      local c, s = match(value, '^%d+$'), '0'
      if not c then
        c, s = match(value, '^(%d+):(%d+)$')
      end
      if c then
        c, s = tonumber(c), tonumber(s)
        if c > now and c - now <= HORIZON and s < drip then
          clear, slack = c, s
        end
      end
      local drips = ceil(size / drip)
      if not varies and clear - now > drips * rate + STEP_BACK then
        clear, slack, changed[i] = now + drips * rate, drips * drip - size, true
      end
    elseif value and not match(value.err, '^WRONGTYPE') then
      return value
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
    reply[#reply + 1] = clear - now
    reply[#reply + 1] = fits[i] and slack or -1 - slack
  end
  key = key + buckets
end
return reply
