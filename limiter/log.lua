-- A sliding log keeps each admission for the time of one window, which is its
-- period: a time and some units. A key holds a string: a header and the entries, 7
-- bytes and 3 each, oldest first. The first number is a time. The second is the sum
-- of the units up to there, the entry's own included, modulo 2^24: the difference of
-- two such sums is what lies between. The newest is in the header, because the next
-- charge may be of the same microsecond:
--
--   1 byte, 108; 8, the time of the summary; 2 and 2, its counts; 4, the sum of all
--   units; 2, how many entries at the beginning have left the window; 2, how many
--   there are; 3, the sum in the last of them; 8 and 2, the newest; 2, how many accounts
--   of held units follow the entries, see held.lua; 2, how many units the summary counts in
--   both windows, see join
--
-- The summary counts the same units in windows that begin at multiples of their
-- length, and is the level of a sliding window, see sliding.lua. It is what nodes know
-- of a log, and what they say. log.go says how they decide by it.
--
-- So its algorithm is a sliding window's, except for what the log itself has, which
-- follows the other arguments.
--
-- A long log is neither read nor written as a whole. Which entries have left the
-- window, and which have to leave before there is room again, is found by bisection,
-- after steps that double, as it is often one of the first. The string is trimmed when
-- half of its entries have left. The key expires when the newest entry has left the window.
--
-- To read and write the whole string, and do nothing else, takes Redis 0.3, 1 and 9 times
-- as long as all of this script at 100, 1000 and 9000 entries, and 3, 28 and 240 times the
-- bytes in the append-only file and to replicas (BenchmarkLog in bench). So the simple form
-- is faster below some hundred entries, but zones of other configurations have thousands.

local byte, format, match, sub = string.byte, string.format, string.match, string.sub
local ceil = math.ceil
local KIND = 108
local HEADER = '>BdHHIHHI3dHHH'
local HEAD, ENTRY, ACCOUNT = 38, 10, 56 -- bytes of the header, of an entry and of an account
local BLANK = string.rep(' ', HEAD)
local TIME = 2 ^ 24        -- a time is stored as what this divides it into, and the rest
local PAGE = 100           -- entries that are read at once
local MOST = 65535         -- units that an entry, or a count, can have
local FULL = 10000         -- units that fill any log
local COUNT = 2 ^ 24       -- more than a window counts

-- header returns the time and the rest of the summary, and the other numbers in
-- the header; or nothing if value is no log.
local function header(value)
  if byte(value) ~= KIND or #value < HEAD then
    return
  end
  local _, clear, before, last, total, from, count, sum, newest, units, accounts, both = read(HEADER, value)
  if clear > 0 and clear < 2 ^ 53 and newest >= 0 and newest < 2 ^ 53 and clear % 1 + newest % 1 == 0
    and from <= count and total >= units and total < COUNT and (newest > 0 or total == 0 and from == count) then
    return clear, before * COUNT + last, total, from, count, sum, newest > 0 and newest, units, accounts, both
  end
end

-- stored returns an entry as it is stored.
local function stored(at, sum)
  return pack('>II3I3', floor(at / TIME), at % TIME, sum)
end

-- entry returns the i-th entry of a log, counting from 0: its time, and the sum of
-- the units up to there.
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
  local high, low, sum = read('>II3I3', text, at + 1)
  return high * TIME + low, sum
end

-- sumBefore returns the sum of the units before the i-th entry.
local function sumBefore(log, i)
  if i == log.from then
    return log.base
  end
  local _, sum = entry(log, i - 1)
  return sum
end

-- search returns the index of the first entry from which on past is true, or the
-- number of entries. past gets the time of an entry, and the units up to there.
local function search(log, past)
  local low, high, step = log.from, log.from, 1
  while high < log.count do
    local at, sum = entry(log, high)
    if past(at, (sum - log.base) % COUNT) then
      break
    end
    low, high, step = high + 1, high + step, 2 * step
  end
  high = min(high, log.count)
  while low < high do
    local middle = floor((low + high) / 2)
    local at, sum = entry(log, middle)
    if past(at, (sum - log.base) % COUNT) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- drop removes the entries before the i-th.
local function drop(log, i)
  local base = sumBefore(log, i)
  log.from, log.base, log.total = i, base, log.total - (base - log.base) % COUNT
end

local write, describe -- see below

-- empty empties a log.
local function empty(log)
  log.text, log.from, log.count, log.total, log.sum, log.base, log.whole = BLANK, 0, 0, 0, 0, 0, true
  log.newest, log.more = nil, nil
end

-- fresh returns an empty log.
local function fresh(key)
  local log = {write = write, describe = describe, empty = empty, key = key}
  empty(log)
  return log
end

-- load reads the whole of a log, whose string will then be written again, with the entries
-- that have been appended to it.
local function load(log)
  if not log.whole then
    log.text, log.whole = call('GET', log.key), true
  end
  if log.more then
    log.text = sub(log.text, 1, HEAD + log.count * ENTRY) .. log.more
    log.count, log.more = log.count + #log.more / ENTRY, nil
  end
end

-- append adds an entry that is not older than the newest.
local function append(log, at, units)
  units = min(units, COUNT - 1 - log.total)
  if log.newest == at and log.units + units <= MOST then
    log.units = log.units + units
  else
    if log.newest then
      log.sum = (log.sum + log.units) % COUNT
      log.more = (log.more or '') .. stored(log.newest, log.sum)
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
  units = min(units, COUNT - 1 - log.total)
  load(log)
  local i = search(log, function(time)
    return time > at
  end)
  local to = HEAD + i * ENTRY
  local text = {sub(log.text, 1, to), stored(at, (sumBefore(log, i) + units) % COUNT)}
  for later = i, log.count - 1 do
    local time, sum = entry(log, later)
    text[#text + 1] = stored(time, (sum + units) % COUNT)
  end
  log.text, log.count = table.concat(text), log.count + 1
  log.sum, log.total = (log.sum + units) % COUNT, log.total + units
end

-- summarize returns the summary of a log's entries. It is only used after the clock was
-- set back, or a node has reported something.
local function summarize(log, period, phase)
  load(log)
  local clear = log.newest - (log.newest - phase) % period + 2 * period
  local function since(time)
    return (log.sum - sumBefore(log, search(log, function(at)
      return at >= time
    end))) % COUNT
  end
  local last, both = since(clear - 2 * period), since(clear - 3 * period)
  return clear, min((both - last) % COUNT, MOST) * COUNT + min(last + log.units, MOST)
end

-- wait returns the time until that many units have left the window.
local function wait(log, units, period)
  if units <= 0 then
    return 0
  end
  local at = log.newest
  if units <= log.total - (log.newest and log.units or 0) then
    local i = search(log, function(_, left)
      return left >= units
    end)
    if i < log.count then
      at = entry(log, i)
    elseif log.more then
      local high, low, sum
      i = 1
      repeat
        high, low, sum, i = read('>II3I3', log.more, i)
      until i > #log.more or (sum - log.base) % COUNT >= units
      at = high * TIME + low
    end
  end
  local ahead = units <= log.total and at + period - now or period -- the rest is held
  return ahead > 0 and ahead < period and ahead or period
end

-- join adds what a node knows, by its summary, and the log does not, and returns the
-- summary of both. Of each window the larger count counts, a window being the window of the
-- server which ends next to the node's. If the node knows of more units, they become an
-- entry, as late as they can have been: when the window ended by the node's reckoning,
-- or now. That may be in the server's next window; then they count in both, and the log
-- knows how many, since the node may later report others in the next one.
--
-- For example, with windows of 10 s, the log has 3 units in the window that ends at 20 s and 2 in
-- the one before; its summary is clear = 30 (that end and a window more), rest = 2 * COUNT + 3. A
-- node reports theirs = 30 and counts = 2 * COUNT + 5 at 14 s: it knows of 5 in this window. Then
-- reported, own and latest are 30, as all speak of the same window; shown and mine are 3, as nothing
-- counts in both; and the 2 that the log lacks become an entry of 14 s. If theirs is
-- 29, since the call took a second less than the last one, reported is 30 too: of the server's
-- windows, the one that ends next to the node's. If the node then reports 6, the log lacks one.
--
--   reported, own, latest  the ends of windows, each and a window more: the node's, by the server's
--                      clock; that of the summary; and of the window that is now
--   last, before       what the node counts in its window, and in the one before
--   shown, shown2      what the summary counts in these
--   mine, mine2        the same, except for units that an earlier join has put into both: the node
--                      may mean others
--   both, bothIn       how many those are, and until when the later of their windows counts
local function join(log, clear, rest, theirs, counts, period, phase)
  if counts == 0 then
    return clear, rest
  end
  local last, ends = min(counts % COUNT, MOST), theirs - period
  local before, ends2 = min(floor(counts / COUNT), MOST), ends - period
  local shown, shown2 = rest % COUNT, floor(rest / COUNT)
  local mine, mine2 = max(shown - (log.bothIn == clear and log.both or 0), 0), shown2
  local late = (theirs - phase) % period
  local latest = now - (now - phase) % period + 2 * period
  local reported = min(2 * late < period and theirs - late or theirs - late + period, latest)
  local own = log.newest and clear or max(reported, latest - period)
  if reported < own then -- what was their last window is the one before
    reported, before, ends2, last = own, last, ends, 0
  elseif reported > own then
    mine, mine2, shown, shown2 = 0, mine, 0, shown
  end
  if reported == latest then
    -- A denied request that counts takes the place of others in the log, but not in mine.
    log.unknown = max(min(mine, log.total) - last, 0)
  end
  local added
  if before > mine2 and ends2 - 1 > now - period then
    insert(log, min(ends2 - 1, now), min(before - mine2, FULL))
    added = true
  end
  if last > mine and ends - 1 > now - period then
    insert(log, min(ends - 1, now), min(last - mine, FULL))
    added = true
  end
  if not log.newest then
    return clear, rest
  end
  mine = max(mine, last) -- of the later window, without what counts in both
  before, last = max(before, shown2), max(last, shown)
  if added then
    local clear2, rest2 = summarize(log, period, phase)
    for _ = reported, clear2 - 1, period do
      reported, before, last, mine = reported + period, last, 0, 0
    end
    local before2, last2 = floor(rest2 / COUNT), rest2 % COUNT
    for _ = clear2, reported - 1, period do
      before2, last2 = last2, 0
    end
    before, last = max(before, before2), max(last, last2)
  end
  log.both, log.bothIn = last - mine, reported
  return reported, before * COUNT + last
end

-- count adds a denied request. Its units take the place of the oldest in a log that is
-- full: it never holds less than before, nor more. Sums of units are kept modulo COUNT, so what
-- lies between two of them is their difference modulo COUNT, and log.base is the sum right
-- before the first unit that counts. If that is in the middle of an entry, of which the older
-- units have left, base is in its middle too.
local function count(log, cost, size)
  cost, size = min(cost, size), max(size, log.total)
  append(log, now, min(cost, FULL))
  drop(log, search(log, function(_, left)
    return log.total - left < size
  end))
  while log.from == log.count and log.more do
    local _, _, sum, rest = read('>II3I3', log.more)
    local n = (sum - log.base) % COUNT
    if log.total - n < size then
      break
    end
    log.total, log.base, log.more = log.total - n, sum, rest <= #log.more and sub(log.more, rest) or nil
  end
  local over = log.total - size -- the units of the oldest that have to leave without its others
  if over > 0 and (log.from < log.count or log.more) then
    log.total, log.base = size, (log.base + over) % COUNT
  elseif over > 0 then
    log.total, log.units = size, log.units - over
  end
end

local function logged(what, clear, rest, n, at, size, period, drip, phase, other, otherStart, log, otherRest)
  if log then
    if what == 'room' then
      return size - n - log.total
    elseif what == 'reported' then -- what the node does not know may be the same units
      return size - log.total - max(n - (log.unknown or 0), 0)
    elseif what == 'near' then
      return other
    elseif what == 'join' then
      return join(log, clear, rest, other, otherRest, period, phase)
    elseif what == 'add' then -- held units that lapsed earlier have left, or count as the newest
      at = max(at, log.newest or 0)
      if at <= now - period then
        return clear, rest
      end
      append(log, at, min(n, FULL))
    else
      count(log, other, size)
      other = min(other, size)
    end
  end
  return sliding(what, clear, rest, n, at, size, period, drip, phase, other, otherStart, log, otherRest)
end

-- readLog reads the log in a key: what it holds, its summary, whether that differs from
-- what is stored, whether the key has something else, and the text of its record of held units.
-- Instead of the log it may return an error. Entries of the future, if the clock
-- was set back, count as of now.
local function readLog(key, period, phase)
  local value = tryCall('GETRANGE', key, 0, HEAD + PAGE * ENTRY - 1)
  local log = fresh(key)
  if value == '' then
    return log, 0, 0, false, false, false
  elseif type(value) ~= 'string' then
    if not match(value.err, '^WRONGTYPE') then
      call('GETRANGE', key, 0, 0) -- which raises the error
    end
    return log, 0, 0, false, true, false
  end
  local clear, rest, total, from, count, sum, newest, units, accounts, both = header(value)
  local size = HEAD + (count or 0) * ENTRY
  local whole = #value < HEAD + PAGE * ENTRY or size <= #value
  if not clear or (whole and #value or call('STRLEN', key)) < size then
    return log, 0, 0, false, true, false
  end
  local record = false
  if accounts > 0 then
    local last = size + accounts * ACCOUNT
    record = last <= #value and sub(value, size + 1, last) or call('GETRANGE', key, size, last - 1)
    if #record < accounts * ACCOUNT then
      return log, 0, 0, false, true, false
    end
  end
  log.text, log.from, log.count, log.newest, log.units, log.whole = value, from, count, newest, units, whole
  log.total, log.sum, log.base = total, sum, (sum - total + units) % COUNT
  log.both, log.bothIn = both, clear
  local edge, changed = now - period, false
  if log.from < count and entry(log, log.from) <= edge then
    drop(log, search(log, function(at)
      return at > edge
    end))
  end
  if newest and log.from == count and newest <= edge then
    log.total, log.newest = log.total - units, nil
  end
  if log.newest and (log.total < units or log.from < count and newest <= edge) or not log.newest and log.total ~= 0 then
    return fresh(key), 0, 0, false, true, false
  end
  if log.newest and (newest > now or clear - now > 2 * period or clear <= now) then
    -- The clock was set back, or a node has reported an entry in a window that ended
    -- later for it.
    load(log)
    if newest > now then
      log.count = search(log, function(at)
        return at > now
      end)
      sum = sumBefore(log, log.count)
      units = units + (log.sum - sum) % COUNT
      if units > log.total then
        return fresh(key), 0, 0, false, true, false
      end
    end
    log.newest, log.units, log.sum = min(newest, now), min(units, MOST), sum
    log.total, changed = log.total - units + log.units, true
    clear, rest = summarize(log, period, phase)
  end
  if not log.newest then
    clear, rest = 0, 0
  end
  return log, clear, rest, changed, false, record
end

-- describe returns the reply about a log besides its summary: the units it holds, with those that
-- block the request, the time until it is empty, and the times until it has room for
-- cost units, at least one, and for one, when that many are held.
function describe(log, size, cost, held, blocking, period)
  local units = log.total + held - size
  return log.total + blocking, log.newest and log.newest + period - now or 0,
    cost <= size and wait(log, units + max(cost, 1), period) or 0, wait(log, units + 1, period)
end

-- write writes a log.
function write(log, clear, rest, record, period)
  local newest = log.newest or 0
  if newest == 0 and not record then
    call('SET', log.key, '', 'PX', 1)
    return
  end
  local last = (record and max(newest, holds.lapses(record)) or newest) + period
  local accounts = record and holds.text(record) or ''
  local before = floor(rest / COUNT)
  local count = log.count + (log.more and #log.more / ENTRY or 0)
  if not log.whole and log.from > log.count / 2 then
    load(log)
  end
  local from = log.whole and 0 or log.from
  local first = pack(HEADER, KIND, clear, min(before, MOST), min(rest % COUNT, MOST), log.total, from, count - log.from + from,
    log.sum, newest, log.newest and log.units or 0, #accounts / ACCOUNT, log.bothIn == clear and log.both or 0)
  if log.whole then
    local text = sub(log.text, HEAD + 1 + log.from * ENTRY, HEAD + log.count * ENTRY)
    call('SET', log.key, first .. text .. (log.more or '') .. accounts, 'PX', ceil((last - now) / 1000) + 1)
    return
  end
  if log.more or record then
    call('SETRANGE', log.key, HEAD + log.count * ENTRY, (log.more or '') .. accounts)
  end
  call('SETRANGE', log.key, 0, first)
  call('PEXPIREAT', log.key, format('%.0f', ceil(last / 1000)))
end
