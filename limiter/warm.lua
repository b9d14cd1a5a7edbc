-- A limit that warms up admits a request once the wait after the last one is over,
-- and stores permits while it is idle, which make the next waits longer. Its time is
-- that at which the store is full again, and its slack is not what its name says
-- but how much of the time before that has to be idle. Its drip rate is the time for
-- a unit at the full rate, which need not be a whole number; its drip size is 1 µs
-- more than the idle time in which the whole store fills, and its phase the cold
-- factor. warm.go has the same arithmetic in Go, in the same order.

local max = math.max

return {
  -- The level at now of a bucket that is stored as clear and slack, and whether
  -- that differs. It was w drips until its next free moment when it was written.
  at = function(clear, slack, rate, _, w)
    if w > 256 then
      w = ((w - 257) % 16 + 17) * 2 ^ (floor((w - 257) / 16) + 4)
    end
    local wait = ceil(w * rate)
    if clear - slack - now <= wait + 1 then -- which may be rounded
      return clear, slack, false
    elseif wait + slack <= 0 then
      return now, 0, true
    end
    return now + wait + slack, slack, true -- the clock was set back
  end,

  -- How many units it has room for.
  room = function(clear, slack, size)
    return clear - slack <= now and size or 0
  end,

  -- The same by what a node knows, told and spare, beside what it has in flight.
  beside = function(told, spare, inFlight, size)
    return inFlight == 0 and told <= spare and size or 0
  end,

  -- Units that are held leave room for no others.
  alone = true,

  -- The level to which a charge at the given time can be added.
  started = function(clear, slack, when)
    if clear <= when then
      return when, 0
    end
    return clear, min(slack, clear - when)
  end,

  -- The level with cost more units. Beyond the horizon it would be no level: denied
  -- requests that count, and units that are held, are not bounded by the size.
  add = function(clear, slack, cost, interval, drip, factor)
    local warm = drip - 1
    local threshold = 0.5 * warm / interval
    local above = 2 * warm / (interval + interval * factor)
    local slope = (interval * factor - interval) / above
    local each = max(floor(warm / (threshold + above)), 1)
    local full = max(floor((threshold + above) * each), 1)

    local used = slack / each
    local wait = cost * interval
    local high = above - used
    if high > 0 then
      local steep = min(high, cost)
      wait = wait + steep * slope * (high - steep / 2)
    end
    local taken = min(slack + cost * each, full, warm)
    return min(clear - slack + ceil(wait) + taken, now + HORIZON), taken
  end,

  -- The level that counts a request which was denied: no permits are taken.
  count = function(clear, slack, _, interval)
    return max(clear - slack, now + ceil(interval)) + slack, slack
  end,

  -- The most drip rates until units that are charged now no longer count.
  drips = function(units, rate, drip)
    return units + 2 * drip / rate
  end,

  -- The time whose distance is stored, to find out if the clock was set back.
  free = function(clear, slack)
    return max(clear - slack, now)
  end,

  -- The level that holds what is stored and what a node has told. Equal slacks mean
  -- that both sides know the same charges, and their times differ by the delay.
  join = function(clear, slack, theirs, counts, ahead, rate)
    if theirs <= now then
      return clear, slack
    elseif slack == counts and not ahead and clear > now and 2 * max(theirs - clear, clear - theirs) < rate then
      return clear, slack
    end
    local free = max(clear - slack, theirs - counts)
    clear = max(clear, theirs)
    return clear, clear - free
  end,

  -- Whether a slack is no more than what a node knew.
  within = function(slack, told)
    return slack <= told
  end,
}
