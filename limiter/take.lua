-- Decides requests against their limits, all in one atomic step. Most are leaky
-- buckets, and fixed windows are too; other algorithms are in files of their own,
-- which are inserted below.
--
-- The buckets of one request form a group. A call carries one or more groups,
-- which are decided one after the other. Every number is an integer below 2^53, up
-- to which doubles are exact; times are in microseconds.
--
--   KEYS   the buckets' keys, group after group
--   ARGV   one argument for each run of equal groups, which describes such a group.
--          It is packed, because each argument costs the server as much as the work
--          on it: 2 bytes, the number of groups; 2 bytes, the number of buckets in
--          each; 1 byte, what to do, see below; 1 byte, whether levels are told; then
--          for each bucket
--            1 byte, its algorithm: 0 for a leaky bucket, 1 for a sliding window, 2
--              for a sliding log, 3 if it warms up, see the files of that name
--            1 byte, whether it counts denied requests; if units are to be released,
--              whether to commit them instead, as the request counts
--            5 doubles, size, drip rate, drip size, phase and cost: the phase is the
--              time from the clock's zero to an aligned drip, or -1
--            if levels are told, 3 doubles, a time until the bucket runs empty and a
--              slack, the least that it holds as far as a node knows, although this
--              server may have lost it, and how many units that node has in flight
--              beside it, for which there must be room too; and 1 byte, whether this
--              server may drip at other times than that node: the node has found the
--              bucket empty, or another server may have begun anew
--            if units are to be settled, 1 double, until when they are held
--   reply  for each bucket two integers: the time until it runs empty, t, or -1 - t
--          if its key held something that is not a bucket; and its slack, s, or
--          -1 - s if it denies, or -1 - 2^50 - s if it denies only because of units
--          that are held or in flight. If units are to be held, or to look at or
--          reset a bucket, two more: how many are held, and until when. After those
--          of a whole group, four for each of its logs: how many units it holds, the
--          time until it is empty, and the times until it has room, after this
--          request, for the same cost and for one unit
--
-- What to do with a group:
--
--   0  charge all buckets if all have room, otherwise none
--   1  charge each bucket that has room
--      (0 to 2: a bucket that counts denied requests is charged in any case, or is full
--      then)
--   2  hold the cost in all buckets if all have room, otherwise in none: the request
--      has other buckets in other slots, and may be denied there
--   3  commit held units: the request was admitted, charge them
--   4  release held units: the request was denied. A cost of 0 changes nothing, but
--      shows whether the server accepts writes: the key is written back unchanged,
--      and the time in the reply is not 0 if there was something to write
--   5  remove the buckets, unless they hold more than the level that is told, which is
--      all that was known to the node that evicted them. There is no reply
--   6  peek: only look at the buckets, and write nothing
--   7  reset the buckets: they are empty then, and the reply is what they held
--
-- A log's key is described in log.lua. Any other holds a number of 19 digits. All
-- but the last three are the time at which its bucket runs empty; the last three
-- say how many drips away that was when the key was written, see below. A colon
-- and the slack follow if the slack is not 0: the units by which the last drip
-- before that time falls short of a full drip. The server stores a 19-digit number
-- in as little memory as any other integer, but a double cannot hold it. If units
-- are held, the slack is there even if it is 0, and two more numbers follow: how
-- many, and until when. Held units take room but do not drip. Units that are still
-- held at that time are charged: by then the node that knows the decision cannot
-- reach the server, and if it settles them later, that is ignored. The key expires
-- when the bucket is empty, never before. limit.go has the same arithmetic in Go.
--
-- Since it was written, a bucket can only have dripped. If its time is further
-- away than it was then, the clock was set back: the bucket holds what it held
-- then. Its size cannot show that, because requests with several sizes may use one
-- bucket, which may then hold more than the size of one of them. Up to 256 drips
-- are stored exactly, more of them in steps of at most a sixteenth, rounded up: 16
-- steps for each doubling.
--
-- Most groups have one bucket. They use no tables or functions of their own, which
-- would cost more than the arithmetic.

local call, pcall, unpack = redis.call, redis.pcall, struct.unpack
local floor, ceil, min, number = math.floor, math.ceil, math.min, tonumber
local byte, format, find, match, sub = string.byte, string.format, string.find, string.match, string.sub
local keys, runs = KEYS, ARGV

local HORIZON = 2 ^ 50     -- no bucket's time can lie further ahead
local WINDOW = 2 ^ 49      -- the drip size of a fixed window, which loses all it holds
local HELD_FOR = 10000000
local SLIDING, LOG, WARM = 1, 2, 3
local HOLD, COMMIT, RELEASE, REMOVE, PEEK, RESET = 2, 3, 4, 5, 6, 7

if #runs == 0 then
  return {} -- the caller only checks whether the script exists
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- The other algorithms: the functions that leaky buckets have in line.
local others

local reply, replies, key = {}, 0, 0
for r = 1, #runs do
  local run = runs[r]
  local groups, buckets, what, tells, at = unpack('>HHBB', run)
  local several = buckets > 1
  local rows = several and {}
  local row, kind, counts, size, rate, drip, phase, cost, told, spare, inFlight, own, due, other
  for i = 1, buckets do
    kind, counts, size, rate, drip, phase, cost, at = unpack('>BBddddd', run, at)
    if phase < 0 then
      phase = nil
    end
    other = nil
    if kind > 0 then
      others = others or setmetatable({}, {__index = function(made, kind)
        if kind == SLIDING then
          made[SLIDING] = (function()
            --@ sliding.lua
          end)()
        elseif kind == LOG then
          local sliding = made[SLIDING]
          made[LOG] = (function()
            --@ log.lua
          end)()
        elseif kind == WARM then
          made[WARM] = (function()
            --@ warm.lua
          end)()
        end
        return rawget(made, kind)
      end})
      other = others[kind]
    end
    if tells == 1 then
      told, spare, inFlight, own, at = unpack('>dddB', run, at)
    end
    if what == COMMIT or what == RELEASE then
      due, at = unpack('>d', run, at)
    end
    if several then
      -- With room for the results in each group: clear, slack, fits, changed,
      -- foreign, held, till and blocked, and the log of a bucket that has one.
      rows[i] = {size, rate, drip, cost, counts, told, spare, 0, 0, false, false, false, 0, 0, false, due, inFlight, own, phase, other}
    end
  end

  if what == REMOVE then
    for i = 1, groups * buckets do
      if several then
        row = rows[(i - 1) % buckets + 1]
        rate, told, spare, other = row[2], row[6], row[7], row[20]
      end
      local value = pcall('GET', keys[key + i])
      value = type(value) == 'string' and value or ''
      local c, s = match(value, '^(%d+)%d%d%d:?(%d*)$')
      if other and other.summary then
        c, s = other.summary(value)
      end
      c, s = number(c), number(s) or 0
      -- If nobody else has charged the bucket, its time is no further ahead than
      -- told, because told arrives late. What another node has added is a whole
      -- drip, or takes slack.
      local apart = c and c - now - told
      local alike = s >= spare
      if other then
        alike = other.within(s, spare)
      end
      if c and c > now and 2 * apart < rate and (alike or apart <= -rate / 2) then
        pcall('SET', keys[key + i], '', 'PX', 1)
      end
    end
    key, groups = key + groups * buckets, 0
  end

  for _ = 1, groups do
    -- The level of each bucket, and whether the request fits.
    local admitted = true
    local clear, slack, fits, changed, foreign, held, till, blocked, log, theirs
    for i = 1, buckets do
      if several then
        row = rows[i]
        size, rate, drip, cost, counts, told, spare = row[1], row[2], row[3], row[4], row[5], row[6], row[7]
        due, inFlight, own, phase, other = row[16], row[17], row[18], row[19], row[20]
      end
      clear, slack, changed, foreign, held, till = now, 0, false, false, 0, 0
      local value
      if other and other.open then
        log, clear, slack, changed, foreign, held, till = other.open(keys[key + i], rate, phase)
        if log.err then
          return log
        end
      else
        value = pcall('GET', keys[key + i])
      end
      if type(value) == 'string' then
        -- A value that is not a bucket counts as an empty one; the next charge
        -- replaces it. A time has 16 digits from 2001 to 2286, followed by three
        -- of drips. Any other value of that length that Lua reads as a number,
        -- such as a hexadecimal one, is taken for a bucket too: checking each
        -- digit would cost as much as reading it.
        local c, w, s
        if #value == 19 or find(value, '^%d%d%d%d+$') then
          local hundreds, tens, ones = byte(value, -3, -1)
          c, w, s = number(sub(value, 1, -4)), hundreds * 100 + tens * 10 + ones - 5328, 0
        end
        if not c then
          c, w, s = match(value, '^(%d+)(%d%d%d):(%d+)$')
          if not c then
            c, w, s, held, till = match(value, '^(%d+)(%d%d%d):(%d+):(%d+):(%d+)$')
            held = number(held) or 0
            till = held > 0 and number(till) or 0
          end
          c, w, s = number(c), number(w), number(s)
        end
        if not c or c - now > HORIZON or s >= drip or held > HORIZON then
          foreign, held, till = value ~= '', 0, 0
        elseif c > now then
          clear, slack = c, s
          if other then
            clear, slack, changed = other.at(c, s, rate, phase, w)
          elseif c - now > w * rate then
            local step = 1
            if w > 256 then
              step = 2 ^ (floor((w - 257) / 16) + 4)
              w = ((w - 257) % 16 + 17) * step
            end
            if c - now > w * rate then -- the clock was set back
              local full = ceil(size / drip)
              if w > full and w - full < step then
                w, slack = full, full * drip - size -- it may have been exactly full
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
          if till <= now and other then
            -- They were not settled in time. They count as of then.
            if clear == now then
              clear, slack = c, s
            end
            clear, slack = other.started(clear, slack, till, rate, phase)
            clear, slack = other.add(clear, slack, held, rate, drip, phase)
            held, changed = 0, true
            if clear <= now then
              clear, slack = now, 0
            end
          elseif till <= now then
            -- They were not settled in time. They drip from then on.
            if c <= till then
              clear, slack = till - (phase and (till - phase) % rate or 0), 0
            elseif c <= now then
              clear, slack = c, s
            end
            local drips = ceil((held - slack) / drip)
            clear, slack, held, changed = min(clear + drips * rate, now + HORIZON), slack + drips * drip - held, 0, true
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
      if tells == 1 and other then
        local c, s = clear, slack
        clear, slack = other.join(c, s, now + told, spare, own == 1, rate, phase, log)
        changed = changed or clear ~= c or slack ~= s
      elseif tells == 1 then
        -- The level arrived with some delay. If the times of drips are known, it
        -- means the nearest one, so that the delay does not add to the level.
        theirs = now + told
        if told > 0 and phase then
          theirs = phase + floor((theirs - phase) / rate + 0.5) * rate
          if drip == WINDOW then -- none ends later than the present one
            theirs = min(theirs, now - (now - phase) % rate + rate)
          end
        elseif told > 0 and clear > now and own == 0 then
          theirs = clear + floor((theirs - clear) / rate + 0.5) * rate
        end
        -- The later of two times holds no less than the other level, now and at
        -- any time until then, unless both lie within one drip: then it does with
        -- the smaller slack.
        if theirs > now then
          if theirs - clear >= rate or clear == now then
            clear, slack, changed = theirs, spare, true
          elseif theirs - clear > -rate and (theirs > clear or spare < slack) then
            clear, slack, changed = theirs > clear and theirs or clear, min(slack, spare), true
          end
        end
      end
      if what < COMMIT and other then
        local room = other.room(clear, slack, size, rate, log) - cost
        fits = room >= 0
        blocked = fits and (held > room or held > 0 and other.alone
          or tells == 1 and other.beside(told, spare, inFlight, size, rate, log, phase) < cost + held)
        fits = fits and not blocked
      elseif what < COMMIT then
        fits = cost <= size and clear - now <= floor((size - cost + slack) / drip) * rate
        blocked = false
        if fits and tells == 1 then
          -- What is in flight adds to what the node knows.
          local n = size - cost - held - inFlight
          blocked = n < 0 or theirs - now > floor((n + spare) / drip) * rate
          fits = not blocked
        end
        if fits and held > 0 then
          blocked = cost + held > size or clear - now > floor((size - cost - held + slack) / drip) * rate
          fits = not blocked
        end
      elseif what >= PEEK then
        fits, changed = false, what == RESET and (value or log)
      else
        fits = cost > 0 and cost <= held and till == due
        if fits then
          changed = true
        elseif cost == 0 then
          -- This probe does not know the bucket's numbers.
          fits, changed = true, false
          if type(value) == 'string' then
            call('SET', keys[key + i], value, 'KEEPTTL')
            clear, foreign = clear > now and clear or now + 1, false
          end
        end
      end
      admitted = admitted and fits
      if several then
        row[8], row[9], row[10], row[11], row[12] = clear, slack, fits, changed, foreign
        row[13], row[14], row[15] = held, till, blocked
        if log then
          row[22], log = log, nil
        end
      end
    end

    local more -- what is replied after the others' numbers
    for i = 1, buckets do
      if several then
        row = rows[i]
        size, rate, drip, cost, counts, phase, other = row[1], row[2], row[3], row[4], row[5], row[19], row[20]
        clear, slack, fits, changed, foreign = row[8], row[9], row[10], row[11], row[12]
        held, till, blocked = row[13], row[14], row[15]
        log = other and row[22]
      end
      local charge, count = fits and (admitted or what == 1), false
      if what >= HOLD and fits then
        charge = what == COMMIT or what == RELEASE and counts == 1
        if what >= COMMIT then
          held = held - cost
        elseif admitted then
          if held == 0 then
            till = now + HELD_FOR
          end
          held, changed = held + cost, true
        end
      end
      if counts == 1 and what < COMMIT and not (fits and admitted) then
        charge, count = fits, not fits
      end
      if other then
        if charge or count or blocked then
          clear, slack = other.started(clear, slack, now, rate, phase)
        end
        if charge then
          clear, slack = other.add(clear, slack, cost, rate, drip, phase, log)
          changed = true
        elseif count then
          clear, slack = other.count(clear, slack, cost, rate, size, log)
          changed = true
        end
      elseif count and held < size then
        -- The bucket is full, beside what is held, as of now.
        local drips = ceil((size - held) / drip)
        local c, s = now - (phase and (now - phase) % rate or 0) + drips * rate, drips * drip - size + held
        if drip == WINDOW and clear > now then
          c = clear -- the window ends when it would
        end
        if clear == now or c - clear >= rate then
          clear, slack, changed = c, s, true
        elseif c - clear > -rate and (c > clear or s < slack) then -- as for what is told
          clear, slack, changed = c > clear and c or clear, min(slack, s), true
        end
      elseif phase and clear == now and (charge or blocked) then
        clear = now - (now - phase) % rate -- the window has begun
      end
      if charge and not other then
        local units = cost - slack
        units = units + -units % drip -- in whole drips
        clear, slack, changed = clear + units / drip * rate, slack + units - cost, true
      end
      if changed and log and what ~= RESET then
        other.write(log, clear, slack, held, till, rate)
      elseif changed and what ~= RESET then
        -- In two pieces, which even 32-bit servers can format as integers.
        local w = clear - now
        if other and other.free then
          w = ceil((other.free(clear, slack) - now) / rate)
        else
          w = (w + -w % rate) / rate -- as rounded up, but without a call
        end
        if w > 256 then
          local code, step = 241, 16
          while w > 32 * step do
            code, step = code + 16, 2 * step
          end
          w = code + floor((w - 1) / step)
        end
        local micros = clear % 1e6
        local value = format('%u%09d', (clear - micros) / 1e6, micros * 1000 + w)
        local last = clear
        if held > 0 then
          value = format('%s:%.0f:%.0f:%.0f', value, slack, held, till)
          last = (clear < till and till or clear) + (other and other.drips(held, rate, drip) or ceil(held / drip)) * rate
        elseif slack > 0 then
          value = format('%s:%.0f', value, slack)
        end
        -- A key expires in so many milliseconds, as not all servers take a time: in
        -- the one after the bucket runs empty at the latest, and never before.
        local ahead = last - now
        ahead = (ahead - ahead % 1000) / 1000 + 1
        if ahead < 1 then
          ahead = 1 -- the bucket is empty already
        elseif ahead < 4e9 then
          ahead = format('%u', ahead) -- which takes less time than a number
        end
        call('SET', keys[key + i], value, 'PX', ahead)
      end
      if blocked and other then
        clear, slack = other.add(clear, slack, held, rate, drip, phase)
      elseif blocked then
        local drips = ceil((held - slack) / drip)
        clear, slack = min(clear + drips * rate, now + HORIZON), slack + drips * drip - held
      end
      reply[replies + 1] = foreign and now - clear - 1 or clear - now
      reply[replies + 2] = (fits or what >= COMMIT) and slack or -1 - slack - (blocked and HORIZON or 0)
      replies = replies + 2
      if what >= HOLD and (what == HOLD or what >= PEEK) then
        reply[replies + 1], reply[replies + 2] = held, till
        replies = replies + 2
      end
      if log then
        local also = (blocked or what == HOLD and fits or what >= PEEK) and held or 0
        local units, empty, again, one = other.tell(log, row and row[1] or size, cost, also, rate)
        more = more or {}
        for _, n in ipairs({blocked and units + held or units, empty, again, one}) do
          more[#more + 1] = n
        end
      end
      if changed and what == RESET then -- not earlier: what a log tells may be read from its key
        call('SET', keys[key + i], '', 'PX', 1)
      end
    end
    if more then
      for i = 1, #more do
        replies = replies + 1
        reply[replies] = more[i]
      end
    end
    key = key + buckets
  end
end
if math.type then -- this Lua has integers too, and replies others as text
  for i = 1, replies do
    reply[i] = floor(reply[i])
  end
end
return reply
