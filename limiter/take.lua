-- Decides requests against their leaky buckets, all in one atomic step.
--
-- A request's buckets are a group; a call carries one group or several, which
-- are decided one after the other. Every number is an integer below 2^53, the
-- last that a double holds exactly; times are microseconds.
--
-- KEYS   the buckets' keys, group after group
-- ARGV   for each group what it consists of, or '' if that is the same as of the
--        group before. It is packed, for arguments cost the server as much as
--        what is done with them: 2 bytes, how many buckets there are; 1 byte, 1
--        if each bucket that has room is charged even if another denies, 0 if
--        all are or none; then for each bucket 4 doubles, size, drip rate, drip
--        size and cost, and 1 byte, 1 if the size may differ from request to
--        request, else 0; or 2 more, and then 2 doubles, a time until it runs
--        empty and a slack that it has at least: it was charged elsewhere while
--        this server could not be asked
-- reply  for each bucket: the time until it runs empty, t, or -1 - t if its key
--        held something else than a bucket; and its slack, s, or -1 - s if it
--        denies
--
-- A key holds the time at which its bucket runs empty, and behind a colon the
-- slack, if there is any: the units by which the last drip before that time
-- falls short of a full one. The key expires when the bucket is empty, never
-- before. limit.go has the same arithmetic in Go.
--
-- Most groups are of one bucket. They make do without tables and functions of
-- their own, which would cost more than the arithmetic.

local call, pcall, unpack = redis.call, redis.pcall, struct.unpack
local floor, ceil, format, match, number = math.floor, math.ceil, string.format, string.match, tonumber
local keys, groups = KEYS, ARGV

local HORIZON = 2 ^ 50    -- further ahead no bucket's time can lie
local STEP_BACK = 1000000 -- further ahead than a full bucket by this: the clock was set back

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local reply, replies, key = {}, 0, 0
local group, buckets, each, size, rate, drip, cost, flags
for g = 1, #groups do
  local another = groups[g] ~= ''
  if another then
    group = groups[g]
    buckets, each = unpack('>HB', group)
  end
  local several, at = buckets > 1, 4

  -- What each bucket holds, and whether the request fits in.
  local seen, admitted = several and {}, true
  local clear, slack, fits, changed, foreign
  for i = 1, buckets do
    if another or several then
      size, rate, drip, cost, flags, at = unpack('>ddddB', group, at)
    end
    clear, slack, changed, foreign = now, 0, false, false
    local value = pcall('GET', keys[key + i])
    if type(value) == 'string' then
      -- What is no bucket of ours is an empty one; the next charge replaces it.
      local c, s = match(value, '^%d+$'), 0
      if not c then
        c, s = match(value, '^(%d+):(%d+)$')
        s = number(s)
      end
      c = number(c)
      if not c or c - now > HORIZON or s >= drip then
        foreign = true
      elseif c > now then
        clear, slack = c, s
        local drips = ceil(size / drip)
        if c - now > drips * rate + STEP_BACK and flags % 2 == 0 then
          clear, slack, changed = now + drips * rate, drips * drip - size, true
        end
      end
    elseif value then
      if not match(value.err, '^WRONGTYPE') then
        return value
      end
      foreign = true
    end
    if flags >= 2 then
      local c, s
      c, s, at = unpack('>dd', group, at)
      c = now + c
      -- It was told with some delay: less than half a drip apart is the same.
      local apart = 2 * (c - clear)
      if clear == now or apart >= rate then
        clear, slack, changed = c, s, true
      elseif apart > -rate and s < slack then
        slack, changed = s, true
      end
    end
    fits = cost <= size and clear - now <= floor((size - cost + slack) / drip) * rate
    admitted = admitted and fits
    if several then
      seen[i] = {rate, drip, cost, clear, slack, changed, foreign, fits}
    end
  end

  for i = 1, buckets do
    if several then
      local s = seen[i]
      rate, drip, cost, clear, slack, changed, foreign, fits = s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]
    end
    if fits and (admitted or each == 1) then
      local drips = ceil((cost - slack) / drip)
      clear, slack, changed = clear + drips * rate, slack + drips * drip - cost, true
    end
    if changed then
      local value = slack == 0 and format('%.0f', clear) or format('%.0f:%.0f', clear, slack)
      call('SET', keys[key + i], value, 'PXAT', format('%.0f', ceil(clear / 1000)))
    end
    reply[replies + 1] = foreign and now - clear - 1 or clear - now
    reply[replies + 2] = fits and slack or -1 - slack
    replies = replies + 2
  end
  key = key + buckets
end
return reply
