-- What is stored of a bucket. Its level is two numbers: a time, at which nothing is left of
-- it, and a rest, which only its algorithm understands, and which is less than the bucket's
-- drip. The value of a key is one of these. Its first field is 8 plus the algorithm; written
-- is when it was written:
--
--   12 bytes  4 bits; 52 bits, the time; 40 bits, the time less written. The rest is 0
--   25 bytes  1 byte; doubles, the time, the rest, written
--   more      the same, and 7 doubles for each account of its held units, see held.lua
--   0 bytes   removed: the key expires at once. GET and SET are the only commands for
--             values, so that a user of the server needs no others
--
-- A value that was written later than now was written before the clock was set back:
-- the bucket holds what it held then, and its drips or windows are moved by as much
-- until it is empty. (A clock that is set back by less than the time since it was written
-- only makes the bucket drip later.) A key expires when its bucket is empty, never before.

--# read
-- What is stored, as of now: clear and rest, the level; held, how many units are held, and
-- record, that of their accounts; changed, whether the key has to be written for that; foreign,
-- whether it has something that is not a bucket. Such a value counts as an empty bucket, and
-- the next charge replaces it.
clear, rest, held, record, changed, foreign, entries = 0, 0, 0, false, false, false, false
local value
if readers and readers[kind] then
  entries, clear, rest, changed, foreign, record = readers[kind](keys[key + i], period, phase)
else
  value = tryCall('GET', keys[key + i])
end
if type(value) == 'string' then
  local first, c, s, written = 0, 0, 0, 0
  if #value == 12 then
    local high, low, ahead, low2 = read('>I3I4I4B', value)
    first = floor(high / 1048576)
    c = high % 1048576 * 4294967296 + low
    written = c - ahead * 256 - low2
  elseif #value == 25 then
    first, c, s, written = read('>Bddd', value)
  elseif #value > 25 and (#value - 25) % 56 == 0 then
    first, c, s, written = read('>Bddd', value)
    record = value
  end
  -- A level is at most HORIZON ahead when it is written, and held units that lapse
  -- can add as much.
  if first ~= kind + 8 or not (c - written <= 2 * HORIZON and s >= 0 and s < drip and c % 1 + s % 1 + written % 1 == 0) then
    record, foreign = false, value ~= ''
  else
    clear, rest = c, s
    if written > now then -- the clock was set back
      clear, changed = now + c - written, true
    end
  end
elseif value then
  if not string.find(value.err, '^WRONGTYPE') then
    call('GET', keys[key + i]) -- which raises the error
  end
  foreign = true
end
if not holds and (record or account) then
  --@ held.lua
end
if record then -- the text that has it
  record = holds.parse(record, type(value) == 'string' and 26 or 1)
  if not record then
    clear, rest, foreign = 0, 0, true
  end
end
if record then
  local wasSetBack
  clear, rest, held, wasSetBack = holds.present(record, algorithm, clear, rest, size, period, drip, phase, entries)
  changed = changed or wasSetBack
end
if clear > now then
  clear = min(clear, now + HORIZON)
else
  clear, rest = now, 0
end

--# join
-- What the node reports joins the level. near is the time of the level that it knows, and taken
-- how many units take room in addition to what is stored.
local near
local taken = held
if reports == 1 then
  if reportedStart == 2 then
    taken = held + inFlight
  elseif what < PROBE then
    local c, s = clear, rest
    near = reported > now and algorithm('near', c, s, 0, now, size, period, drip, phase, reported, reportedStart, entries) or now
    if near > now then
      clear, rest = algorithm('join', c, s, 0, now, size, period, drip, phase, near, reportedStart, entries, reportedRest)
      changed = changed or clear ~= c or rest ~= s
    end
  end
end

--# write
-- The value is written, with its expiry.
if entries then
  entries.write(entries, clear, rest, record and record[1] and record, period)
else
  local ahead, last, stored = clear - now, clear, nil
  if record and record[1] then
    last = holds.lapses(record)
    last = max(last, algorithm('add', clear, rest, held, last, size, period, drip, phase))
    last = min(last, now + 2 * HORIZON)
    stored = pack('>Bddd', kind + 8, clear, rest, now) .. holds.text(record)
  elseif rest > 0 or ahead >= 1099511627776 then
    stored = pack('>Bddd', kind + 8, clear, rest, now)
  else
    local low, low2 = clear % 4294967296, ahead % 256
    stored = pack('>I3I4I4B', (kind + 8) * 1048576 + (clear - low) / 4294967296, low, (ahead - low2) / 256, low2)
  end
  -- In milliseconds from now, as not all servers take a time: at most one more
  -- than the bucket takes to be empty, and never less.
  local expires = last - now
  expires = (expires - expires % 1000) / 1000 + 1
  if expires < 1 then
    expires = 1 -- the bucket is empty already
  end
  -- %u takes less time, and has 32 bits on some servers.
  call('SET', keys[key + i], stored, 'PX', string.format(expires < 4e9 and '%u' or '%.0f', expires))
end
