-- Decides requests against their leaky buckets, all in one atomic step.
--
-- A request's buckets are a group; a call carries one group or several, which
-- are decided one after the other. Every number is an integer below 2^53, the
-- last that a double holds exactly; times are microseconds.
--
-- KEYS   the buckets' keys, group after group
-- ARGV   for each run of equal groups what they consist of. It is packed, for
--        arguments cost the server as much as what is done with them: 2 bytes,
--        how many groups there are; 2 bytes, how many buckets each has; 1 byte,
--        1 if each bucket that has room is charged even if another denies, 0 if
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
local floor, ceil, number = math.floor, math.ceil, tonumber
local format, find, match, sub = string.format, string.find, string.match, string.sub
local keys, runs = KEYS, ARGV

local HORIZON = 2 ^ 50    -- further ahead no bucket's time can lie
local STEP_BACK = 1000000 -- further ahead than a full bucket by this: the clock was set back

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local reply, replies, key = {}, 0, 0
for r = 1, #runs do
  local run = runs[r]
  local groups, buckets, each, at = unpack('>HHB', run)
  local several = buckets > 1
  local rows = several and {}
  local row, size, rate, drip, cost, flags, owed, spare
  for i = 1, buckets do
    size, rate, drip, cost, flags, at = unpack('>ddddB', run, at)
    if flags >= 2 then
      owed, spare, at = unpack('>dd', run, at)
    end
    if several then
      -- With room for what comes out in each group: clear, slack, fits, changed and
      -- foreign.
      rows[i] = {size, rate, drip, cost, flags, owed, spare, 0, 0, false, false, false}
    end
  end

  for _ = 1, groups do
    -- What each bucket holds, and whether the request fits in.
    local admitted = true
    local clear, slack, fits, changed, foreign
    for i = 1, buckets do
      if several then
        row = rows[i]
        size, rate, drip, cost, flags, owed, spare = row[1], row[2], row[3], row[4], row[5], row[6], row[7]
      end
      clear, slack, changed, foreign = now, 0, false, false
      local value = pcall('GET', keys[key + i])
      if type(value) == 'string' then
        -- What is no bucket of ours is an empty one; the next charge replaces it.
        -- A time has 16 digits from 2001 to 2286. Whatever else of that length reads
        -- as a number, as hexadecimal may, passes for one too: to look at each digit
        -- would cost as much as to read it.
        local c, s = (#value == 16 or find(value, '^%d+$')) and number(value), 0
        if not c then
          c, s = match(value, '^(%d+):(%d+)$')
          c, s = number(c), number(s)
        end
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
        -- It was told with some delay: less than half a drip apart is the same.
        local apart = 2 * (now + owed - clear)
        if clear == now or apart >= rate then
          clear, slack, changed = now + owed, spare, true
        elseif apart > -rate and spare < slack then
          slack, changed = spare, true
        end
      end
      fits = cost <= size and clear - now <= floor((size - cost + slack) / drip) * rate
      admitted = admitted and fits
      if several then
        row[8], row[9], row[10], row[11], row[12] = clear, slack, fits, changed, foreign
      end
    end

    for i = 1, buckets do
      if several then
        row = rows[i]
        rate, drip, cost = row[2], row[3], row[4]
        clear, slack, fits, changed, foreign = row[8], row[9], row[10], row[11], row[12]
      end
      if fits and (admitted or each == 1) then
        local drips = ceil((cost - slack) / drip)
        clear, slack, changed = clear + drips * rate, slack + drips * drip - cost, true
      end
      if changed then
        -- In two pieces, which even servers of 32 bits have integers for.
        local value = format('%d%09d', floor(clear / 1e9), clear % 1e9)
        -- A key has expired when the clock has gone past the millisecond, so it may
        -- be told the one in which the bucket runs empty; but not the one that it is,
        -- which newer servers take for past and store nothing.
        local expires = sub(value, 1, -4)
        if clear - now < 1000 then
          expires = format('%.0f', ceil(clear / 1000))
        end
        if slack > 0 then
          value = format('%s:%.0f', value, slack)
        end
        call('SET', keys[key + i], value, 'PXAT', expires)
      end
      reply[replies + 1] = foreign and now - clear - 1 or clear - now
      reply[replies + 2] = fits and slack or -1 - slack
      replies = replies + 2
    end
    key = key + buckets
  end
end
return reply
