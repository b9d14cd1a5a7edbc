-- A sliding window counts the units of the window that was last charged and of the
-- one before, and estimates from them how many lie in the time of one window that
-- ends now. Its time is the end of the window after the former, and its slack is
-- not what its name says but these counts, the earlier one times 2^24. Its drip
-- rate is the length of a window. sliding.go has the same arithmetic in Go.

local COUNT = 2 ^ 24 -- more than a window counts
local max = math.max

-- units returns the estimate for a window that runs empty in ahead.
local function units(ahead, slack, rate)
  local last = slack % COUNT
  local before, left = (slack - last) / COUNT, ahead - rate
  if left <= 0 then
    before, last, left = last, 0, ahead
  end
  if left <= 0 then
    return 0
  elseif left >= rate then -- more if the clock was set back
    return before + last
  elseif before * left < 2 ^ 53 then
    return floor(before * left / rate) + last
  end
  -- In octal, digit by digit, because before * left has too many digits.
  local whole, rest, place = 0, 0, COUNT
  repeat
    place = place / 8
    rest = rest * 8 + floor(before / place) % 8 * left
    whole, rest = whole * 8 + floor(rest / rate), rest % rate
  until place == 1
  return whole + last
end

-- nearest returns the clear time that a node means which tells another: it arrives
-- with some delay, and windows end at the same times for all. None counts for longer
-- than the present one, so a delay never prolongs what a level counts.
local function nearest(theirs, rate, phase)
  theirs = phase + floor((theirs - phase) / rate + 0.5) * rate
  return min(theirs, now - (now - phase) % rate + 2 * rate)
end

-- later returns the level that counts windows which are one later, or two, and
-- still holds as much.
local function later(clear, slack, rate, two)
  local before, count = slack % COUNT, units(clear - now, slack, rate)
  if two then
    return clear + 2 * rate, count
  elseif clear - now <= rate then
    return clear + rate, before * COUNT
  end
  return clear + rate, before * COUNT + count - before
end

-- add returns the level with cost more units.
local function add(clear, slack, cost)
  return clear, slack + min(cost, COUNT - 1 - slack % COUNT)
end

return {
  -- The level at now of a bucket that is stored as clear and slack, and whether
  -- that differs.
  at = function(clear, slack, rate, phase)
    if clear - now > 3 * rate then -- the clock was set back
      return now - (now - phase) % rate + 3 * rate, slack, true
    end
    return clear, slack, false
  end,

  -- How many units it has room for, negative if it holds more than its size.
  room = function(clear, slack, size, rate)
    return size - units(clear - now, slack, rate)
  end,

  -- The same by what a node knows, told and spare, beside what it has in flight.
  beside = function(told, spare, inFlight, size, rate, _, phase)
    return size - inFlight - units(nearest(now + told, rate, phase) - now, spare, rate)
  end,

  -- The level to which a charge at the given time can be added.
  started = function(clear, slack, when, rate, phase)
    if clear <= when then
      return when - (when - phase) % rate + 2 * rate, 0
    elseif clear - when > rate then
      return clear, slack
    end
    return clear + rate, slack % COUNT * COUNT
  end,

  add = add,

  -- The level that counts a request which was denied.
  count = add,

  -- The most drip rates until units that are charged now no longer count.
  drips = function()
    return 2
  end,

  -- The level that holds what is stored and what a node has told. Of each window
  -- the larger count counts, so units that both sides know count once. See
  -- slidingHigher in sliding.go.
  join = function(clear, slack, theirs, counts, _, rate, phase)
    theirs = nearest(theirs, rate, phase)
    if theirs <= now or counts == 0 then
      return clear, slack
    end
    local apart = 2 * (theirs - clear)
    if apart >= rate then
      clear, slack = later(clear, slack, rate, apart >= 3 * rate)
    elseif apart <= -rate then
      theirs, counts = later(theirs, counts, rate, apart <= -3 * rate)
    end
    if slack == 0 then
      return theirs, counts
    elseif counts == 0 then
      return clear, slack
    end
    return max(clear, theirs), max(floor(slack / COUNT), floor(counts / COUNT)) * COUNT + max(slack % COUNT, counts % COUNT)
  end,

  -- Whether counts are no more than what a node knew.
  within = function(slack, told)
    return slack % COUNT <= told % COUNT and floor(slack / COUNT) <= floor(told / COUNT)
  end,
}
