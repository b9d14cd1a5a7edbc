-- A limit that warms up admits a request once the wait after the last one is over,
-- and stores permits while it is idle, which make the next waits longer. Its time is
-- that at which the store is full again, and its rest how much of the time before that
-- has to be idle. A negative size says how long before the wait is over the request may
-- be admitted, whatever it costs. Its period is the time for a unit at the full rate, which
-- need not be a whole number; its drip is 1 µs more than the idle time in which the whole
-- store fills, and its phase the cold factor. warm.go has the same arithmetic, in the same
-- order.
local function warm(what, clear, rest, n, at, size, period, drip, phase, other, otherStart, _, otherRest)
  local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
  local room, latest = what == 'room' or what == 'reported', at
  if size < 0 then
    latest, size = at - size, 9007199254740992
  end
  if room and n == 0 then
    return clear - rest <= latest and size or 0

  elseif room or what == 'add' then
    if clear <= at then
      clear, rest = at, 0
    end
    rest = min(rest, clear - at)
    local idle = drip - 1
    local threshold = 0.5 * idle / period
    local above = 2 * idle / (period + period * phase)
    local slope = (period * phase - period) / above
    local each = max(floor(idle / (threshold + above)), 1)
    local full = max(floor((threshold + above) * each), 1)

    local used = rest / each
    local wait = n * period
    local high = above - used
    if high > 0 then
      local steep = min(high, n)
      wait = wait + steep * slope * (high - steep / 2)
    end
    local free = clear - rest + ceil(wait)
    if room then -- next to n units
      return free <= latest and size or 0
    end
    rest = min(rest + n * each, full, idle)
    return free + rest, rest

  elseif what == 'near' then
    return other

  elseif what == 'count' then -- no permits are taken
    if clear <= at then
      clear, rest = at, 0
    end
    rest = min(rest, clear - at)
    return max(clear - rest, latest + ceil(period)) + rest, rest
  end

  -- join. Equal rests mean that both sides know the same charges, and their times
  -- differ by the delay.
  if rest == otherRest and otherStart == 0 and clear > at and 2 * max(other - clear, clear - other) < period then
    return clear, rest
  end
  local free = max(clear - rest, other - otherRest)
  clear = max(clear, other)
  return clear, clear - free
end
