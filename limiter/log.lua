-- A sliding log keeps each admission for the time of one window, which is its drip
-- rate: a time and some units. A key holds a string: a header and the entries, 8
-- bytes and 2 each, oldest first. The newest is in the header, because the next
-- charge may be of the same microsecond:
--
--   1 byte, 76; 8, the time of the summary; 2 and 2, its counts; 4, the sum of all
--   units; 2, how many entries at the beginning have left the window; 2, how many
--   there are; 8 and 2, the newest; 2 and 8, how many units are held, until when
--
-- The summary counts the same units in windows that begin at multiples of their
-- length, and is that of a sliding window, see sliding.lua. It is what nodes know
-- of a log, and what they tell. log.go says how they decide by it.
--
-- A long log is neither read nor written as a whole: that takes a step for each
-- entry that has left the window, or has to leave before there is room again. The
-- string is trimmed when half of its entries have left. The key expires when the
-- newest entry has left the window.

local pack = struct.pack
local KIND = 76
local HEADER = '>BdHHIHHdHHd'
local HEAD, ENTRY = 41, 10 -- bytes of the header and of an entry
local PAGE = 100           -- entries that are read at once
local MOST = 65535         -- units that an entry, or a count, can have
local FULL = 10000         -- units that fill any log
local COUNT = 2 ^ 24       -- more than a window counts
local max = math.max

-- header returns the time and the slack of the summary, and the other numbers in
-- the header; or nothing if value is no log.
local function header(value)
  if byte(value) ~= KIND or #value < HEAD then
    return
  end
  local _, clear, before, last, total, from, count, newest, units, held, till = unpack(HEADER, value)
  if clear > 0 and clear < 2 ^ 53 and newest >= 0 and newest < 2 ^ 53 and till >= 0 and till < 2 ^ 53
    and from <= count and total >= units and total <= MOST * (count - from + 1) and (newest > 0 or total == 0 and from == count) then
    return clear, before * COUNT + last, total, from, count, newest > 0 and newest, units, held, till
  end
end

-- entry returns the i-th entry of a log, counting from 0: its time and its units.
local function entry(log, i)
  local text, at = log.text, HEAD + i * ENTRY
  if at + ENTRY > #text then
    local page = i - i % PAGE
    if log.page ~= page then
      at = HEAD + page * ENTRY
      log.page, log.paged = page, call('GETRANGE', log.key, at, at + PAGE * ENTRY - 1)
    end
    text, at = log.paged, (i - page) * ENTRY
  end
  return unpack('>dH', text, at + 1)
end

-- fresh returns an empty log.
local function fresh(key)
  return {key = key, text = '', from = 0, count = 0, total = 0, whole = true}
end

-- load reads the whole of a log, whose string will then be written anew.
local function load(log)
  if not log.whole then
    log.text, log.whole = call('GET', log.key), true
  end
end

-- append adds an entry that is not older than the newest.
local function append(log, at, units)
  if log.newest == at and log.units + units <= MOST then
    log.units = log.units + units
  else
    if log.newest then
      log.more = (log.more or '') .. pack('>dH', log.newest, log.units)
    end
    log.newest, log.units = at, units
  end
  log.total = log.total + units
end

-- insert adds an entry that may be older than others.
local function insert(log, at, units)
  if not log.newest or at >= log.newest then
    return append(log, at, units)
  end
  load(log)
  if log.more then
    log.text = sub(log.text, 1, HEAD + log.count * ENTRY) .. log.more
    log.count, log.more = log.count + #log.more / ENTRY, nil
  end
  local low, high = log.from, log.count
  while low < high do
    local middle = floor((low + high) / 2)
    if entry(log, middle) <= at then
      low = middle + 1
    else
      high = middle
    end
  end
  local to = HEAD + low * ENTRY
  log.text = sub(log.text, 1, to) .. pack('>dH', at, units) .. sub(log.text, to + 1, HEAD + log.count * ENTRY)
  log.count, log.total = log.count + 1, log.total + units
end

-- summarize returns the summary of a log's entries. It is only used after the clock
-- was set back, and the like.
local function summarize(log, rate, phase)
  local clear = log.newest - (log.newest - phase) % rate + 2 * rate
  local last, before, i = log.units, 0, log.count
  while i > log.from do
    i = i - 1
    local at, units = entry(log, i)
    if at >= clear - 2 * rate then
      last = last + units
    elseif at >= clear - 3 * rate then
      before = before + units
    else
      break
    end
  end
  return clear, min(before, MOST) * COUNT + min(last, MOST)
end

-- wait returns the time until so many units have left the window.
local function wait(log, units, rate)
  if units <= 0 then
    return 0
  end
  local at, n, i = log.newest, 0, log.from
  while units > 0 and i < log.count do
    at, n = entry(log, i)
    units, i = units - n, i + 1
  end
  i = 1
  while units > 0 and log.more and i < #log.more do
    at, n, i = unpack('>dH', log.more, i)
    units = units - n
  end
  if units > 0 and log.newest then
    at, units = log.newest, units - log.units
  end
  local ahead = units <= 0 and at + rate - now or rate -- the rest is held
  return ahead > 0 and ahead < rate and ahead or rate
end

return {
  -- Reads the log in a key: what it holds, its summary, whether that differs from
  -- what is stored, whether the key has something else, and what is held until when.
  -- Instead of the log it may return an error. Entries of the future, if the clock
  -- was set back, count as of now.
  open = function(key, rate, phase)
    local value = pcall('GETRANGE', key, 0, HEAD + PAGE * ENTRY - 1)
    local log = fresh(key)
    if type(value) ~= 'string' and not match(value.err, '^WRONGTYPE') then
      return value
    elseif value == '' then
      return log, now, 0, false, false, 0, 0
    elseif type(value) ~= 'string' then
      return log, now, 0, false, true, 0, 0
    end
    local clear, slack, total, from, count, newest, units, held, till = header(value)
    local size = HEAD + (count or 0) * ENTRY
    local whole = #value < HEAD + PAGE * ENTRY or size <= #value
    if not clear or (whole and #value or call('STRLEN', key)) < size then
      return log, now, 0, false, true, 0, 0
    end
    log.text, log.from, log.count, log.newest, log.units, log.whole = value, from, count, newest, units, whole
    local edge, changed, left = now - rate, false, 0
    while log.from < count do
      local at, n = entry(log, log.from)
      if not (at <= edge) then
        break
      end
      log.from, left = log.from + 1, left + n
    end
    if newest and log.from == count and newest <= edge then
      left, log.newest = left + units, nil
    end
    log.total = total - left
    if log.newest and (log.total < units or log.from < count and newest <= edge) or not log.newest and log.total ~= 0 then
      return fresh(key), now, 0, false, true, 0, 0
    end
    if log.newest and (newest > now or clear - now > 2 * rate or clear <= now) then
      -- The clock was set back, or a node has told of an entry in a window that ended
      -- later for it.
      load(log)
      while newest > now and log.count > log.from do
        local at, n = entry(log, log.count - 1)
        if at <= now then
          break
        end
        units, log.count = units + n, log.count - 1
      end
      log.newest, log.units = min(newest, now), min(units, MOST)
      log.total, changed = log.total - units + log.units, true
      clear, slack = summarize(log, rate, phase)
    end
    if not log.newest then
      clear, slack = 0, 0
    end
    if held > 0 and till > now + HELD_FOR then
      till, changed = now + HELD_FOR, true
    end
    if held > 0 and till <= now then
      -- They were not settled in time. They count as of then.
      local at = max(till, log.newest or 0)
      if at > edge then
        clear, slack = sliding.started(clear, slack, at, rate, phase)
        clear, slack = sliding.add(clear, slack, held)
        append(log, at, min(held, FULL))
      end
      held, changed = 0, true
    end
    if not log.newest then
      clear, slack = now, 0
    end
    return log, clear, slack, changed, false, held, till
  end,

  -- How many units it has room for, negative if it holds more than its size.
  room = function(_, _, size, _, log)
    return size - log.total
  end,

  -- The same beside what a node has in flight: told as what that node knows, and
  -- the same with that.
  beside = function(told, spare, told2, spare2, size, _, log)
    if told == told2 then
      return size - log.total - max(spare2 % COUNT - spare % COUNT, 0)
    end
    return size - log.total - spare2 % COUNT
  end,

  started = sliding.started,

  -- The summary with cost more units; they are added to the log if there is one.
  add = function(clear, slack, cost, _, _, _, log)
    if log then
      append(log, now, min(cost, FULL))
    end
    return sliding.add(clear, slack, cost)
  end,

  -- The level that counts a request which was denied. Its units take the place of
  -- the oldest in a log that is full: it never holds less than before.
  count = function(clear, slack, cost, _, size, log)
    cost, size = min(cost, size), max(size, log.total)
    append(log, now, min(cost, FULL))
    while log.from < log.count do
      local _, n = entry(log, log.from)
      if log.total - n < size then
        break
      end
      log.from, log.total = log.from + 1, log.total - n
    end
    while log.from == log.count and log.more do
      local _, n, rest = unpack('>dH', log.more)
      if log.total - n < size then
        break
      end
      log.total, log.more = log.total - n, rest <= #log.more and sub(log.more, rest) or nil
    end
    return sliding.count(clear, slack, cost)
  end,

  -- The summary of what is stored and what a node has told. Of each window the
  -- larger count counts, a window being that of the server which ends next to the
  -- node's. If the node knows of more units, they become an entry, as late as they
  -- can have been: when the window ended by the node's reckoning, or now.
  join = function(clear, slack, theirs, counts, _, rate, phase, log)
    if theirs <= now or counts == 0 then
      return clear, slack
    end
    local last, ends = counts % COUNT, theirs - rate
    local before, ends2 = (counts - last) / COUNT, ends - rate
    local mine = slack % COUNT
    local mine2 = (slack - mine) / COUNT
    local late = (theirs - phase) % rate
    local latest = now - (now - phase) % rate + 2 * rate
    local told = min(2 * late < rate and theirs - late or theirs - late + rate, latest)
    local own = log.newest and clear or max(told, latest - rate)
    if told < own then -- what was their last window is the one before
      told, before, ends2, last = own, last, ends, 0
    elseif told > own then
      mine, mine2 = 0, mine
    end
    if before > mine2 and ends2 - 1 > now - rate then
      insert(log, min(ends2 - 1, now), min(before - mine2, FULL))
    end
    if last > mine and ends - 1 > now - rate then
      insert(log, min(ends - 1, now), min(last - mine, FULL))
    end
    if not log.newest then
      return clear, slack
    end
    return told, max(before, mine2) * COUNT + max(last, mine)
  end,

  -- The reply about a log besides its summary: the units it holds, the time until
  -- it is empty, and the times until it has room for cost units, and for one, when
  -- so many more are held.
  tell = function(log, size, cost, held, rate)
    local units = log.total + held - size
    return log.total, log.newest and log.newest + rate - now or 0,
      cost <= size and wait(log, units + cost, rate) or 0, wait(log, units + 1, rate)
  end,

  -- Writes a log.
  write = function(log, clear, slack, held, till, rate)
    local newest = log.newest or 0
    if newest == 0 and held == 0 then
      call('SET', log.key, 0, 'PXAT', 1)
      return
    end
    local expires = format('%.0f', ceil(((held > 0 and max(newest, till) or newest) + rate) / 1000))
    local before = floor(slack / COUNT)
    local count = log.count + (log.more and #log.more / ENTRY or 0)
    if not log.whole and log.from > log.count / 2 then
      load(log)
    end
    local from = log.whole and 0 or log.from
    local first = pack(HEADER, KIND, clear, min(before, MOST), min(slack % COUNT, MOST), log.total, from, count - log.from + from,
      newest, log.newest and log.units or 0, held, till)
    if log.whole then
      local text = sub(log.text, HEAD + 1 + log.from * ENTRY, HEAD + log.count * ENTRY)
      call('SET', log.key, first .. text .. (log.more or ''), 'PXAT', expires)
      return
    end
    if log.more then
      call('SETRANGE', log.key, HEAD + log.count * ENTRY, log.more)
    end
    call('SETRANGE', log.key, 0, first)
    call('PEXPIREAT', log.key, expires)
  end,

  -- The summary of a stored log, or nothing.
  summary = header,

  -- Whether counts are no more than what a node knew.
  within = sliding.within,
}
