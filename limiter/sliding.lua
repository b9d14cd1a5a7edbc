-- A sliding window counts the units of the window that was last charged and of the
-- one before, and estimates from them how many lie in the time of one window that
-- ends now. Its time is the end of the window after the former, and its rest these
-- counts, the earlier one times 2^24. Its period is the length of a window. sliding.go
-- has the same arithmetic.
local function sliding(what, clear, rest, n, at, size, period, _, phase, other, _, _, otherRest)
  local COUNT = 16777216 -- more than a window counts
  local function units(ahead, rest)
    local last = rest % COUNT
    local before, left = (rest - last) / COUNT, ahead - period
    if left <= 0 then
      before, last, left = last, 0, ahead
    end
    if left <= 0 then
      return 0
    elseif left >= period then -- more if the clock was set back
      return before + last
    elseif before * left < 2 ^ 53 then
      return math.floor(before * left / period) + last
    end
    -- before * left would have more than 53 bits. So this divides as on paper, by the digits of
    -- before in base 8, the highest first: over, the remainder, and left are less than period,
    -- so what is divided is less than 15 periods.
    local whole, over, place = 0, 0, COUNT
    repeat
      place = place / 8
      over = over * 8 + math.floor(before / place) % 8 * left
      whole, over = whole * 8 + math.floor(over / period), over % period
    until place == 1
    return whole + last
  end

  if what == 'room' or what == 'reported' then
    return size - n - units(clear - at, rest)

  elseif what == 'add' or what == 'count' then
    n = what == 'count' and other or n
    if clear <= at then
      clear, rest = at - (at - phase) % period + 2 * period, 0
    elseif clear - at <= period then
      clear, rest = clear + period, rest % COUNT * COUNT
    end
    return clear, rest + math.min(n, COUNT - 1 - rest % COUNT)

  elseif what == 'near' then
    -- Windows end at the same times for all, and none counts for longer than the
    -- present one, so a delay never prolongs what a level counts.
    other = phase + math.floor((other - phase) / period + 0.5) * period
    return math.min(other, at - (at - phase) % period + 2 * period)
  end

  -- join: of each window the larger count counts, so units that both sides know count
  -- once. See windows.join in sliding.go. A level that counts windows which are later
  -- still holds as much.
  local function later(clear, rest, two)
    local before, count = rest % COUNT, units(clear - at, rest)
    if two then
      return clear + 2 * period, count
    elseif clear - at <= period then
      return clear + period, before * COUNT
    end
    return clear + period, before * COUNT + count - before
  end
  if otherRest == 0 then
    return clear, rest
  end
  local apart = 2 * (other - clear)
  if apart >= period then
    clear, rest = later(clear, rest, apart >= 3 * period)
  elseif apart <= -period then
    other, otherRest = later(other, otherRest, apart <= -3 * period)
  end
  if rest == 0 then
    return other, otherRest
  elseif otherRest == 0 then
    return clear, rest
  end
  local last, last2 = rest % COUNT, otherRest % COUNT
  return math.max(clear, other), math.max(rest - last, otherRest - last2) + math.max(last, last2)
end
