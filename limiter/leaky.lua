-- A leaky bucket loses drip units every rate. phase is when, by the clock, or -1 if
-- from its first charge. Its time is when it runs empty, and its rest by how many units
-- the last drip before that falls short of a full one. leaky.go has the same arithmetic.
local function leaky(what, clear, rest, n, at, size, rate, drip, phase, other, own, _, spare)
  if what == 'room' or what == 'beside' then
    if clear <= at then
      return size - n
    end
    local left = clear - at
    return size - n + rest - (left + -left % rate) / rate * drip

  elseif what == 'add' then
    if clear <= at then
      clear, rest = phase < 0 and at or at - (at - phase) % rate, 0
    end
    n = n - rest
    local whole = n + -n % drip
    return clear + whole / drip * rate, whole - n

  elseif what == 'near' then -- the nearest drip, if that is known
    if phase >= 0 then
      other = phase + math.floor((other - phase) / rate + 0.5) * rate
    elseif clear > at and own == 0 then
      other = clear + math.floor((other - clear) / rate + 0.5) * rate
    end
    return other

  elseif what == 'count' then -- it is full, as of now
    local units = size - n
    if units < 1 then
      return clear, rest
    end
    local whole = units + -units % drip
    other, spare = (phase < 0 and at or at - (at - phase) % rate) + whole / drip * rate, whole - units
  end

  -- join: the later of two times holds no less than the other level, now and at any
  -- time until then, unless both lie within one drip: then it does with the smaller
  -- rest.
  if clear <= at or other - clear >= rate then
    return other, spare
  elseif other - clear <= -rate then
    return clear, rest
  end
  return other > clear and other or clear, spare < rest and spare or rest
end
