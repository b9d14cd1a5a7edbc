-- Has wrk send requests that each have one of so many keys in X-Key, drawn at
-- random, and print what e2e reads. The arguments are the number of keys and a
-- seed.

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
  function request()
    return head .. math.random(keys) .. tail
  end
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '{"requests":%d,"micros":%d,"refused":%d,"failed":%d,"p50":%d,"p99":%d}\n',
    summary.requests, summary.duration, e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
