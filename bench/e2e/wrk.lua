-- Has wrk send requests that each have one of so many keys in X-Key, drawn at
-- random, and print what e2e reads. The arguments are the number of keys, a seed,
-- the exponent of Zipf's law that says how often each key is drawn (0: all equally
-- often), and for how many ms a connection waits on average before each request.

local threads = 0

function setup(thread)
  threads = threads + 1
  thread:set('id', threads)
end

function init(args)
  local keys = tonumber(args[1])
  math.randomseed(tonumber(args[2]) + id)
  wrk.headers['X-Key'] = 'key-KEY'
  -- Cut around the key, so that a request costs wrk as little with many keys
  -- as with one.
  local head, tail = wrk.format():match('^(.*)KEY(.*)$')
  local draw = drawer(keys, tonumber(args[3]))
  function request()
    return head .. draw() .. tail
  end
  local pause = tonumber(args[4])
  if pause > 0 then
    function delay()
      return math.random(0, 2 * pause)
    end
  end
end

-- drawer returns a function that draws keys.
function drawer(keys, exponent)
  if exponent == 0 then
    return function() return math.random(keys) end
  end
  local sums, sum = {}, 0 -- of the shares of all keys up to each
  for key = 1, keys do
    sum = sum + key ^ -exponent
    sums[key] = sum
  end
  return function()
    local at, low, high = math.random() * sum, 1, keys
    while low < high do
      local middle = math.floor((low + high) / 2)
      if sums[middle] < at then
        low = middle + 1
      else
        high = middle
      end
    end
    return low
  end
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '{"requests":%d,"micros":%d,"refused":%d,"failed":%d,"p50":%d,"p99":%d}\n',
    summary.requests, summary.duration, e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
