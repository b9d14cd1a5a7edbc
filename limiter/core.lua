-- Decides requests against their limits, all in one atomic step. This file knows
-- groups, stored values, units that are held and what nodes tell, but no algorithm:
-- each of those is a function in a file of its own, which is inserted below.
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
--            1 byte, its algorithm
--            1 byte, whether it counts denied requests; if units are to be released,
--              whether to commit them instead, as the request counts
--            5 doubles, size, rate, drip, phase and cost: what they mean is up to the
--              algorithm, but for the cost
--            if levels are told, 3 doubles, the level that a node knows, its time from
--              now on, although this server may have lost it, and how many units that
--              node has in flight beside it, for which there must be room too; and 1
--              byte, whether the level may have begun at another time here: the node
--              has found the bucket empty, or another server may have begun anew
--            if units are to be settled, 1 double, until when they are held
--   reply  for each bucket two integers: the time until it is empty, t, or -1 - t if
--          its key held something that is not a bucket; and the rest of its level, r,
--          or -1 - r if it denies, or -1 - 2^50 - r if it denies only because of units
--          that are held or in flight. If units are to be held, or to look at or
--          reset a bucket, two more: how many are held, and until when. After those
--          of a whole group, four for each of those that keep entries, see log.lua
--
-- What to do with a group:
--
--   0  charge all buckets if all have room, otherwise none
--   1  charge each bucket that has room
--      (0 to 2: a bucket that counts denied requests is charged in any case, or counts
--      the request as denied)
--   2  hold the cost in all buckets if all have room, otherwise in none: the request
--      has other buckets in other slots, and may be denied there
--   3  commit held units: the request was admitted, charge them
--   4  release held units: the request was denied. A cost of 0 changes nothing, but
--      shows whether the server accepts writes: the key is written back unchanged,
--      and the time in the reply is not 0 if there was something to write
--   5  remove the buckets, unless they hold more than the level that is told, which is
--      all that was known to the node that evicted them
--   6  peek: only look at the buckets, and write nothing
--   7  reset the buckets: they are empty then, and the reply is what they held
--
-- A level is two numbers: a time, at which nothing is left of it, and its rest, which
-- only its algorithm understands. A value begins with 8 plus the algorithm, and is
--
--   in 12 bytes  that in 4 bits, the time in 52, and how far ahead that was when it was
--                written in 40; the rest is 0
--   in 25 bytes  that in 1 byte, and as doubles the time, the rest, and when it was
--                written
--   in 41 bytes  besides, how many units are held, and until when
--
-- If it was written later than now, the clock was set back: the bucket holds what it
-- held then. Units that are still held when their time is up are charged: by then the node
-- that knows the decision cannot reach the server, and if it settles them later, that
-- is ignored. The key expires when the bucket is empty, never before.
--
-- An algorithm is a function of what is asked, a level, a number of units, a time and
-- the limit's numbers:
--
--   room    how many units fit beside n others; 0 or less if none do
--   add     the level with n units more, which are charged at that time
--   count   the level that counts a denied request, beside n units that are held; its
--           cost follows
--   near    the time of another level that follows, which a node tells, without the
--           delay with which it has arrived, and whether it may have begun at another
--           time
--   join    the higher of the level and another that follows, likewise
--   beside  room, in a level that a node knows, beside what it has in flight
--
-- It has no upvalues, because the server makes it anew for each call.

local fields = table.unpack or unpack -- as this Lua has it
local call, pcall, unpack, pack = redis.call, redis.pcall, struct.unpack, struct.pack
local floor, min = math.floor, math.min
local keys, runs = KEYS, ARGV

local HORIZON, HELD_FOR = 2 ^ 50, 10000000
local LEAKY, SLIDING, LOG, WARM, FIXED = 0, 1, 2, 3, 4
local EACH, HOLD, COMMIT, RELEASE, REMOVE, PEEK, RESET = 1, 2, 3, 4, 5, 6, 7

if #runs == 0 then
  return {} -- the caller only checks whether the script exists
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

--@ leaky.lua
local others, readers -- the other algorithms, and what reads those that keep entries, once they are needed

local reply, replies, key = {}, 0, 0
for r = 1, #runs do
  local run = runs[r]
  local groups, buckets, what, tells, at = unpack('>HHBB', run)
  local several = buckets > 1
  local row, rows, asks = nil, several and {}, nil
  local is, kind, counts, size, rate, drip, phase, cost, told, spare, inFlight, own, due
  for i = 1, buckets do
    kind, counts, size, rate, drip, phase, cost, at = unpack('>BBddddd', run, at)
    is = leaky
    if kind ~= LEAKY then
      others = others or {}
      if not others[kind] then
        if kind == FIXED then
          --@ window.lua
          others[FIXED] = window
        elseif kind == WARM then
          --@ warm.lua
          others[WARM] = warm
        else
          --@ sliding.lua
          others[SLIDING] = sliding
          if kind == LOG then
            --@ log.lua
            others[LOG], readers = logged, {[LOG] = read}
          end
        end
      end
      is = others[kind]
    end
    if tells == 1 then
      told, spare, inFlight, own, at = unpack('>dddB', run, at)
      told = now + told
    end
    if what == COMMIT or what == RELEASE then
      due, at = unpack('>d', run, at)
    end
    if several then
      -- With room for the results in each group: clear, rest, held, till, fits,
      -- changed, foreign, blocked and entries.
      rows[i] = {is, kind, counts, size, rate, drip, phase, cost, 0, 0, 0, 0, false, false, false, false, false}
      if tells == 1 or due then
        asks = asks or {}
        asks[i] = {told, spare, inFlight, own, due}
      end
    end
  end

  for _ = 1, groups do
    -- The level of each bucket, and whether the request fits.
    local admitted = true
    local clear, rest, held, till, fits, changed, foreign, blocked, entries
    for i = 1, buckets do
      if several then
        row = rows[i]
        is, kind, counts, size, rate, drip, phase, cost = fields(row, 1, 8)
        if asks then
          told, spare, inFlight, own, due = fields(asks[i], 1, 5)
        end
      end
      clear, rest, held, till, changed, foreign, blocked, entries = now, 0, 0, 0, false, false, false, false

      -- What is stored. A value that is not a bucket counts as an empty one; the next
      -- charge replaces it.
      local value
      if readers and readers[kind] then
        entries, clear, rest, changed, foreign, held, till = readers[kind](keys[key + i], rate, phase)
        if entries.err then
          return entries
        end
      else
        value = pcall('GET', keys[key + i])
      end
      if type(value) == 'string' then
        local was, c, s, written, high, ahead, low
        if #value == 12 then
          high, c, ahead, low = unpack('>I3I4I4B', value)
          was, s = floor(high / 1048576), 0
          c = high % 1048576 * 4294967296 + c
          written = c - ahead * 256 - low
        elseif #value == 25 then
          was, c, s, written = unpack('>Bddd', value)
          if c % 1 + s % 1 + written % 1 ~= 0 then
            was = 0
          end
        elseif #value == 41 then
          was, c, s, written, held, till = unpack('>Bddddd', value)
          if not (held > 0 and held <= HORIZON and till - written <= HELD_FOR and c % 1 + s % 1 + written % 1 + held % 1 + till % 1 == 0) then
            was = 0
          end
        end
        if was ~= kind + 8 or not (c - written <= 2 * HORIZON and s >= 0 and s < drip) then
          held, till, foreign = 0, 0, value ~= ''
        else
          if written > now then -- the clock was set back
            c, changed = now + c - written, true
            till = held > 0 and now + till - written or till
          end
          if held > 0 and till <= now then -- they were not settled in time, and count as of then
            c, s = is('add', c, s, held, till, size, rate, drip, phase)
            held, changed = 0, true
          end
          if c > now then
            clear, rest = min(c, now + HORIZON), s
          end
        end
      elseif value then
        if not string.find(value.err, '^WRONGTYPE') then
          return value
        end
        foreign = true
      end

      -- What a node tells.
      local theirs
      if tells == 1 and what ~= REMOVE then
        local c, s = clear, rest
        theirs = told > now and is('near', c, s, 0, now, size, rate, drip, phase, told, own, entries) or now
        if theirs > now then
          clear, rest = is('join', c, s, 0, now, size, rate, drip, phase, theirs, own, entries, spare)
          changed = changed or clear ~= c or rest ~= s
        end
      end

      if what < COMMIT then
        fits = is('room', clear, rest, 0, now, size, rate, drip, phase, 0, 0, entries) >= cost
        if fits and held > 0 then
          fits = is('room', clear, rest, held, now, size, rate, drip, phase, 0, 0, entries) >= cost
          blocked = not fits
        end
        if fits and theirs then
          fits = is('beside', theirs, spare, inFlight, now, size, rate, drip, phase, 0, 0, entries) >= cost + held
          blocked = not fits
        end
      elseif what == REMOVE then
        fits, changed = false, false
        if clear > now then
          local c = is('near', told, spare, 0, now, size, rate, drip, phase, clear, 0)
          local c2, s2 = is('join', told, spare, 0, now, size, rate, drip, phase, c, 0, false, rest)
          changed = c2 == told and s2 == spare
        end
      elseif what >= PEEK then
        fits, changed = false, what == RESET and (value or entries)
      elseif cost > 0 then
        fits = cost <= held and till == due
        changed = changed or fits
      else -- this probe does not know the bucket's numbers
        fits, changed = true, false
        if type(value) == 'string' then
          call('SET', keys[key + i], value, 'KEEPTTL')
          clear, foreign = clear > now and clear or now + 1, false
        end
      end
      admitted = admitted and fits
      if several then
        row[9], row[10], row[11], row[12], row[13], row[14], row[15], row[16], row[17] =
          clear, rest, held, till, fits, changed, foreign, blocked, entries
      end
    end

    local more -- what is replied after the others' numbers
    for i = 1, buckets do
      if several then
        is, kind, counts, size, rate, drip, phase, cost, clear, rest, held, till, fits, changed, foreign, blocked, entries = fields(rows[i])
      end
      local charge = fits and (admitted or what == EACH)
      if what >= HOLD and fits then
        charge = what == COMMIT or what == RELEASE and counts == 1
        if what ~= HOLD then
          held = held - cost
        elseif admitted then
          if held == 0 then
            till = now + HELD_FOR
          end
          held, changed = held + cost, true
        end
      end
      if counts == 1 and what < COMMIT and not (fits and admitted) then
        charge = fits
        if not fits then
          local c, s = clear, rest
          clear, rest = is('count', c, s, held, now, size, rate, drip, phase, cost, 0, entries)
          changed = changed or clear ~= c or rest ~= s or entries
        end
      end
      if charge then
        clear, rest = is('add', clear, rest, cost, now, size, rate, drip, phase, 0, 0, entries)
        clear, changed = min(clear, now + HORIZON), true
      end
      if changed and what < REMOVE then
        if entries then
          entries.write(entries, clear, rest, held, till, rate)
        else
          local ahead, last, stored = clear - now, clear, nil
          if held > 0 then
            last = is('add', clear, rest, held, till, size, rate, drip, phase)
            stored = pack('>Bddddd', kind + 8, clear, rest, now, held, till)
          elseif rest > 0 or ahead >= 1099511627776 then
            stored = pack('>Bddd', kind + 8, clear, rest, now)
          else
            local low, low2 = clear % 4294967296, ahead % 256
            stored = pack('>I3I4I4B', (kind + 8) * 1048576 + (clear - low) / 4294967296, low, (ahead - low2) / 256, low2)
          end
          -- A key expires in so many milliseconds, as not all servers take a time: in
          -- the one after the bucket is empty at the latest, and never before.
          ahead = last - now
          ahead = (ahead - ahead % 1000) / 1000 + 1
          if ahead < 1 then
            ahead = 1 -- the bucket is empty already
          elseif ahead < 4e9 then
            ahead = string.format('%u', ahead) -- which takes less time than a number
          end
          call('SET', keys[key + i], stored, 'PX', ahead)
        end
      end
      if blocked then
        clear, rest = is('add', clear, rest, held, now, size, rate, drip, phase)
        clear = min(clear, now + HORIZON)
      end
      if what ~= REMOVE then
        reply[replies + 1] = foreign and now - clear - 1 or clear - now
        reply[replies + 2] = (fits or what >= COMMIT) and rest or -1 - rest - (blocked and HORIZON or 0)
        replies = replies + 2
      end
      if what == HOLD or what >= PEEK then
        reply[replies + 1], reply[replies + 2] = held, till
        replies = replies + 2
      end
      if entries and what ~= REMOVE then
        local also = (blocked or what == HOLD and fits or what >= PEEK) and held or 0
        more = more or {}
        for _, n in ipairs({entries.tell(entries, size, cost, also, blocked and held or 0, rate)}) do
          more[#more + 1] = n
        end
      end
      if changed and what >= REMOVE then -- not earlier: what entries tell may be read from its key
        (what == REMOVE and pcall or call)('SET', keys[key + i], '', 'PX', 1)
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
