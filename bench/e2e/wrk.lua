-- Has wrk send requests with so many different keys in X-Key, one after the
-- other, and print what e2e reads. The argument is the number of keys; with 0
-- all requests are alike.

function init(args)
  local keys = tonumber(args[1])
  if keys == 0 then
    return
  end
  -- Made beforehand, so that sending them costs wrk little more than the same
  -- request again and again.
  local requests = {}
  for i = 1, keys do
    wrk.headers['X-Key'] = string.format('key-%d', i)
    requests[i] = wrk.format()
  end
  local i = 0
  function request()
    i = i % keys + 1
    return requests[i]
  end
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '{"requests":%d,"micros":%d,"refused":%d,"failed":%d,"p50":%d,"p99":%d}\n',
    summary.requests, summary.duration, e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50), latency:percentile(99)))
end
