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
--        what to do, see below; then for each bucket 4 doubles, size, drip rate,
--        drip size and cost, and 1 byte, 0; or 2, and then 4 doubles, a time
--        until it runs empty and a slack that it has at least: what a node knows
--        of it that this server may have lost; and the same with what that node
--        has on the way, for which there has to be room; and 8 more if the server
--        has never known it; or 4 more, and then a double, until when the units
--        are held that are to be settled
-- reply  for each bucket: the time until it runs empty, t, or -1 - t if its key
--        held something else than a bucket; and its slack, s, or -1 - s if it
--        denies, or -1 - 2^50 - s if it denies only for units that are held or on
--        the way; if units are to be held then also how many are, and until when
--
-- What to do with a group:
--
-- 0  charge all buckets if all have room, else none
-- 1  charge each bucket that has room
-- 2  hold the cost in all buckets if all have room, else none: the request has
--    other buckets in other slots, and may be denied there
-- 3  charge what was held: it was admitted
-- 4  let go of what was held: it was denied. A cost of 0 changes nothing, but
--    shows whether the server takes writes: a key is written as it is
-- 5  remove the buckets, unless they hold more than a node knew that has
--    forgotten them: for each there are only 3 doubles, the time until it runs
--    empty, a slack and the drip rate. There is no reply
--
-- A key holds the time at which its bucket runs empty, in all but the last three
-- digits; in those how many drips that was away when it was written, see below; and
-- behind a colon the slack, if there is any: the units by which the last drip
-- before that time falls short of a full one. All of it but the slack is one number
-- of 19 digits, which the server keeps in no more memory than any other, but a
-- double can't hold. If units are held, two more numbers follow: how many, and
-- until when. Held units take room but do not drip. Units that are still held then
-- are charged: the node that knows what became of them can't tell, and what it
-- tells later is ignored. The key expires when the bucket is empty, never before.
-- limit.go has the same arithmetic in Go.
--
-- Since it was written a bucket can only have dripped. If its time is further away
-- than it was then, the clock was set back: it holds what it held then. The size
-- tells nothing of that, for requests of several sizes may meet in a bucket, and it
-- may hold more than that of one of them. Up to 256 drips are told as they are, more
-- in steps of at most a sixteenth, rounded up: 16 for each doubling.
--
-- Most groups are of one bucket. They make do without tables and functions of
-- their own, which would cost more than the arithmetic.

local call, pcall, unpack = redis.call, redis.pcall, struct.unpack
local floor, ceil, frexp, min, number = math.floor, math.ceil, math.frexp, math.min, tonumber
local byte, format, find, match, sub = string.byte, string.format, string.find, string.match, string.sub
local keys, runs = KEYS, ARGV

local HORIZON = 2 ^ 50     -- further ahead no bucket's time can lie
local SECOND = 1000000
local HELD_FOR = 10 * SECOND
local HOLD, COMMIT, RELEASE, REMOVE = 2, 3, 4, 5

if #runs == 0 then
  return {} -- somebody only wants to know whether there is this script
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local reply, replies, key = {}, 0, 0
for r = 1, #runs do
  local run = runs[r]
  local groups, buckets, what, at = unpack('>HHB', run)
  if what == REMOVE then
    for i = 1, groups * buckets do
      local told, spare, rate = unpack('>ddd', run, at + (i - 1) % buckets * 24)
      local value = pcall('GET', keys[key + i])
      local c, s = match(type(value) == 'string' and value or '', '^(%d+)%d%d%d:?(%d*)$')
      c, s = number(c), number(s) or 0
      -- Where nobody else has charged it, it lies no further ahead: what was told
      -- is late. What another node has added is a drip, or takes slack.
      local apart = c and c - now - told
      if c and c > now and 2 * apart < rate and (s >= spare or apart <= -rate / 2) then
        pcall('SET', keys[key + i], 0, 'PXAT', 1)
      end
    end
    key, groups, buckets = key + groups * buckets, 0, 0
  end
  local several = buckets > 1
  local rows = several and {}
  local row, size, rate, drip, cost, flags, told, spare, due, told2, spare2
  for i = 1, buckets do
    size, rate, drip, cost, flags, at = unpack('>ddddB', run, at)
    if flags > 0 and flags % 4 >= 2 then
      told, spare, told2, spare2, at = unpack('>dddd', run, at)
    end
    if flags > 0 and flags % 8 >= 4 then
      due, at = unpack('>d', run, at)
    end
    if several then
      -- With room for what comes out in each group: clear, slack, fits, changed,
      -- foreign, held, till and blocked.
      rows[i] = {size, rate, drip, cost, flags, told, spare, 0, 0, false, false, false, 0, 0, false, due, told2, spare2}
    end
  end

  for _ = 1, groups do
    -- What each bucket holds, and whether the request fits in.
    local admitted = true
    local clear, slack, fits, changed, foreign, held, till, blocked
    for i = 1, buckets do
      if several then
        row = rows[i]
        size, rate, drip, cost, flags, told, spare = row[1], row[2], row[3], row[4], row[5], row[6], row[7]
        due, told2, spare2 = row[16], row[17], row[18]
      end
      clear, slack, changed, foreign, held, till = now, 0, false, false, 0, 0
      local value = pcall('GET', keys[key + i])
      if type(value) == 'string' then
        -- What is no bucket of ours is an empty one; the next charge replaces it.
        -- A time has 16 digits from 2001 to 2286, and three of drips. Whatever else of
        -- that length begins with a number, as hexadecimal may be, passes for one too:
        -- to look at each digit would cost as much as to read it.
        local c, w, s
        if #value == 19 or find(value, '^%d%d%d%d+$') then
          local hundreds, tens, ones = byte(value, -3, -1)
          c, w, s = number(sub(value, 1, -4)), hundreds * 100 + tens * 10 + ones - 5328, 0
        end
        if not c then
          c, w, s = match(value, '^(%d+)(%d%d%d):(%d+)$')
          if not c then
            c, w, s, held, till = match(value, '^(%d+)(%d%d%d):(%d+):(%d+):(%d+)$')
            held, till = number(held) or 0, number(till) or 0
          end
          c, w, s = number(c), number(w), number(s)
        end
        if not c or c - now > HORIZON or s >= drip or held > HORIZON then
          foreign, held = true, 0
        elseif c > now then
          clear, slack = c, s
          if c - now > w * rate then
            local step = 1
            if w > 256 then
              step = 2 ^ (floor((w - 257) / 16) + 4)
              w = ((w - 257) % 16 + 17) * step
            end
            if c - now > w * rate then -- the clock was set back
              local full = ceil(size / drip)
              if w > full and w - full < step then
                w, slack = full, full * drip - size -- it may have been just full
              end
              clear, changed = now + w * rate, true
              if w < 1 then
                clear, slack = now, 0
              end
            end
          end
        end
        if held > 0 then
          if till > now + HELD_FOR then -- the clock was set back
            till, changed = now + HELD_FOR, true
          end
          if till <= now then
            -- They were not settled in time. They drip from then on.
            if c <= till then
              clear, slack = till, 0
            elseif c <= now then
              clear, slack = c, s
            end
            local drips = ceil((held - slack) / drip)
            clear, slack, held, changed = clear + drips * rate, slack + drips * drip - held, 0, true
            if clear <= now then
              clear, slack = now, 0
            end
          end
        end
      elseif value then
        if not match(value.err, '^WRONGTYPE') then
          return value
        end
        foreign = true
      end
      if flags > 0 and flags % 4 >= 2 then
        -- It was told with some delay. If both know the same charges, their times
        -- are whole drips apart: less than half a drip is the delay. Of fast drips
        -- nobody knows whether they are the same, and so the lesser slack holds.
        local apart = now + told - clear
        local near = rate > 2 * SECOND and rate / 2 or rate
        if clear == now or 2 * apart >= rate or flags >= 8 and apart > 0 then
          if clear > now and apart < near then
            spare = min(spare, slack)
          end
          clear, slack, changed = now + told, spare, true
        elseif apart > -near and spare < slack then
          slack, changed = spare, true
        end
      end
      if what < COMMIT then
        fits = cost <= size and clear - now <= floor((size - cost + slack) / drip) * rate
        blocked = false
        if fits and flags > 0 and flags % 4 >= 2 and now + told2 > clear then
          blocked = cost + held > size or told2 > floor((size - cost - held + spare2) / drip) * rate
          fits = not blocked
        end
        if fits and held > 0 then
          blocked = cost + held > size or clear - now > floor((size - cost - held + slack) / drip) * rate
          fits = not blocked
        end
      else
        fits = cost <= held and till == due
        if fits then
          changed = true
        elseif cost == 0 then
          -- It does not know the bucket's numbers.
          fits, changed = true, false
          if type(value) == 'string' then
            call('SET', keys[key + i], value, 'KEEPTTL')
          end
        end
      end
      admitted = admitted and fits
      if several then
        row[8], row[9], row[10], row[11], row[12] = clear, slack, fits, changed, foreign
        row[13], row[14], row[15] = held, till, blocked
      end
    end

    for i = 1, buckets do
      if several then
        row = rows[i]
        rate, drip, cost = row[2], row[3], row[4]
        clear, slack, fits, changed, foreign = row[8], row[9], row[10], row[11], row[12]
        held, till, blocked = row[13], row[14], row[15]
      end
      local charge = fits and (admitted or what == 1)
      if what >= HOLD and fits then
        charge = what == COMMIT
        if what >= COMMIT then
          held = held - cost
        elseif admitted then
          if held == 0 then
            till = now + HELD_FOR
          end
          held, changed = held + cost, true
        end
      end
      if charge then
        local drips = ceil((cost - slack) / drip)
        clear, slack, changed = clear + drips * rate, slack + drips * drip - cost, true
      end
      if changed then
        -- In two pieces, which even servers of 32 bits have integers for.
        local w = ceil((clear - now) / rate)
        if w > 256 then
          local m, x = frexp(w - 1)
          w = floor(m * 32) + 16 * x + 97
        end
        local value = format('%u%09d', floor(clear / 1e6), clear % 1e6 * 1000 + w)
        -- A key has expired when the clock has gone past the millisecond, so it may
        -- be told the one in which the bucket runs empty; but not the one that it is,
        -- which newer servers take for past and store nothing.
        local expires = sub(value, 1, -7)
        if held > 0 then
          value = format('%s:%.0f:%.0f:%.0f', value, slack, held, till)
          local last = (clear < till and till or clear) + ceil(held / drip) * rate
          expires = format('%.0f', ceil(last / 1000))
        else
          if clear - now < 1000 then
            expires = format('%.0f', ceil(clear / 1000))
          end
          if slack > 0 then
            value = format('%s:%.0f', value, slack)
          end
        end
        call('SET', keys[key + i], value, 'PXAT', expires)
      end
      if blocked then
        local drips = ceil((held - slack) / drip)
        clear, slack = min(clear + drips * rate, now + HORIZON), slack + drips * drip - held
      end
      reply[replies + 1] = foreign and now - clear - 1 or clear - now
      reply[replies + 2] = (fits or what >= COMMIT) and slack or -1 - slack - (blocked and HORIZON or 0)
      replies = replies + 2
      if what == HOLD then
        reply[replies + 1], reply[replies + 2] = held, till
        replies = replies + 2
      end
    end
    key = key + buckets
  end
end
return reply
