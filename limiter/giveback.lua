-- Takes units out of a leaky bucket again that a request was charged before it
-- was denied by a bucket in another slot of the cluster.
--
-- KEYS   the bucket's key
-- ARGV   its drip rate in µs, its drip size, and the units
-- reply  1 if the key was written
--
-- To give 0 units back only shows whether the server takes writes. What a key
-- holds is told in take.lua.

local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' then
  if value and not string.match(value.err, '^WRONGTYPE') then
    return value
  end
  return {}
end
local clear, slack = string.match(value, '^(%d+):?(%d*)$')
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
clear, slack = tonumber(clear), tonumber(slack) or 0
if not clear or clear <= now or clear - now > 2 ^ 50 then
  return {}
end

local rate, drip, units = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local drips = math.floor((slack + units) / drip)
clear, slack = clear - drips * rate, slack + units - drips * drip
if clear <= now then
  clear, slack = now, 0
end
value = slack == 0 and string.format('%.0f', clear) or string.format('%.0f:%.0f', clear, slack)
-- Already past, for an empty bucket: it expires at once, or counts as empty.
redis.call('SET', KEYS[1], value, 'PXAT', string.format('%.0f', math.ceil(clear / 1000)))
return {1}
