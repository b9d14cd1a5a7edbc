# Two commands do all set-up: `make run` and `make test`.

CADDY_VERSION = v2.11.9
XCADDY        = go tool -modfile=tools/go.mod xcaddy
LINT          = go tool -modfile=$(CURDIR)/tools/lint/go.mod golangci-lint run --allow-parallel-runners

.PHONY: run build test check test-race test-bench test-faults test-fuzz traces test-operation lint targets spare compiled valkey fuzz fuzz-small faults soak programs monitors dist release-check bench bench-e2e performance costs picture far

# Build Caddy with this module and serve the example on localhost:8080.
run: build
	./caddy run --config example.Caddyfile

# Build Caddy with this checkout: what is built is the path behind the version, which says
# from which commit, in Go's form, since Go records none of a module that was replaced.
COMMIT = v0.0.0-$(shell TZ=UTC0 git log -1 --date=format-local:%Y%m%d%H%M%S --format=%cd)-$(shell git rev-parse --short=12 HEAD)
build:
	$(XCADDY) build $(CADDY_VERSION) --output ./caddy \
		--with github.com/seed-387a6c65/caddy-ratelimit@$(COMMIT)=.

# Install what the tests need, and run those of all packages but the longest: some ten
# minutes. They run anew each time, since Go's cache of results does not know of other
# processes. Those that measure time run last, alone.
HOW ?= -p 2 -short
TIMED = ^TestTimed
test: programs
	go vet ./...
	$(MAKE) test-untimed
	$(MAKE) test-timed

test-untimed:
	go test -count=1 $(HOW) -skip '$(TIMED)' ./...

test-timed:
	go test -count=1 $(HOW) -p 1 -parallel 1 -run '$(TIMED)' ./limiter ./limiter/internal/redisscript ./test/behaviour

# All that CI runs, besides the README's example: some forty minutes on two cores. What
# tests draw at random differs from commit to commit and is the same for one: make check SEED=n
# draws something else. What starts servers runs one after the other; what only computes runs
# beside it, with a priority that gives way to everything else: the faults wait for most of their
# time, and what comes after them is compiled meanwhile. All is compiled as xcaddy does, so that
# what both need is compiled once, and vetted by the linter alone, which vets what go test does
# and more, of all modules.
check: export HOW = -p 2
check: export SEED ?= $(shell printf %d 0x$$(git rev-parse --short=8 HEAD))
check: export GOFLAGS = -trimpath -vet=off
check: export CGO_ENABLED = 0
check: programs monitors
	$(MAKE) --jobs=2 --output-sync=target servers spare
	$(MAKE) test-timed valkey

servers:
	$(MAKE) test-faults
	$(MAKE) test-untimed
	$(MAKE) test-race
	$(MAKE) test-operation

spare:
	chrt --idle 0 $(MAKE) compiled lint targets test-fuzz test-bench build

# Compile what test-race and test-untimed do; what the faults need is compiled for them by then.
compiled:
	CGO_ENABLED=1 go list -race -export -test -deps $(RACES) >/dev/null
	go list -export -test -deps ./... >/dev/null

# The tests in which goroutines meet, with the race detector: not the longest, those that
# measure time, and those of commands, which have one goroutine.
COMMANDS = ^Test(Check|Convert|CountGuesses|Explain|KeysThat|Places|Remedies|Replay|Words)
RACES = . ./limiter/... ./internal/adaptive ./internal/admin/... ./internal/outcome ./internal/rule/... \
	./internal/state/... ./internal/telemetry/... ./internal/testing/... ./test/behaviour
test-race: programs
	CGO_ENABLED=1 go test -race -short -count=1 -p 2 -timeout 20m -skip '$(TIMED)|$(COMMANDS)' $(RACES)

# See that each benchmark still works, once.
test-bench: programs
	cd bench && go test -count=1 -timeout 1h ./...

# Cause every fault briefly, on real Caddys and Redis servers.
test-faults: programs
	cd test/faults && go test -count=1 -timeout 20m .

# Fuzz briefly what reads replies, stored values and logs. The other targets would have all of
# Caddy compiled once more, with what fuzzing counts: make fuzz FUZZ_ROUNDS=1.
test-fuzz:
	$(MAKE) fuzz-small FUZZ_ROUNDS=1

# Run the tests of servers on Valkey instead of Redis, where it can be installed. Any
# other server that takes the options of redis-server can be named by REDIS_SERVER.
valkey: programs
	@if command -v valkey-server >/dev/null || apt-get install -y --no-install-recommends valkey-server >/dev/null 2>&1; then \
		echo "on Valkey"; REDIS_SERVER=valkey-server go test -short -count=1 -run '$(TESTS_OF_SERVERS)' ./limiter ./limiter/internal/redisscript ./test/behaviour; \
	else echo "Valkey is not installed, and can't be: not tested on it"; fi

TESTS_OF_SERVERS = Redis|Cluster|Sentinel|Server|StoresAgree|OneKey|Removal|ShortReplies|Deciders|Inspect|HeldUnits

# Check ten thousand random traces of each algorithm in Redis, and twenty thousand
# histories of held units, and simulate what concurrency auto does with ten seeds: some
# six minutes. As many traces in this process, and one seed, are part of make test.
TRACES = 10000
HISTORIES = 20000
traces: programs
	go test -count=1 -run '^Test(Redis(Buckets|Windows|SlidingWindows|WarmUp|Logs)|StoresAgree(OnLogs)?)$$' \
		./limiter -args -traces $(TRACES)
	go test -count=1 -run '^TestGoodput$$' ./internal/adaptive -args -seeds 10
	go test -count=1 -run '^Test(HeldUnitsOfManyNodes|SettledOnceInHistories)$$' ./limiter -args -traces $(HISTORIES)

# Test what operators use: the dashboard, the alerts and the files in deploy, with a
# real Prometheus, reports in a real browser, what documents say of nginx with one,
# manifests with the types and loaders that read them, and what makes a release.
test-operation: programs monitors
	cd test/manifests && go test -count=1 .
	cd tools/release && go test -count=1 .
	cd test/operation && go test -count=1 .

# Lint all modules with what .golangci.yml has, and the workflows of GitHub.
lint:
	$(LINT) ./...
	cd bench && $(LINT) ./...
	cd test/faults && $(LINT) ./...
	cd test/operation && $(LINT) ./...
	cd test/manifests && $(LINT) ./...
	cd tools/release && $(LINT) ./...
	go tool -modfile=tools/go.mod actionlint

# Type-check for a system that is not Unix and has 32 bits and for a third one (a release is
# built for all), and run on 32 bits the tests of the arithmetic, of the store in the process and
# of both stores side by side.
targets:
	go run ./internal/testing/typecheck windows/386 darwin/arm64
	CGO_ENABLED=0 GOARCH=386 go test -timeout 1h -run '$(TESTS_32BIT)' ./limiter ./internal/bucket

TESTS_32BIT = Limit|Admitted|Decisions|Clock|Bucket|Memory|Table|Div|DrainAnd|Summarize|Seed001|Extremes|Validate|Retry|Denial|Remaining|Window|Bounds|Sizes|StoresAgree|Numbers|Options|NewRedis

# Feed what users, clients and servers may send to what reads it. A round is a number
# of inputs, which takes each target some five seconds. Before Go 1.27, fuzzing for a
# time may fail without an input that does (golang/go#75804).
FUZZ_ROUNDS = 60
FUZZ = go test -run '^$$' -fuzztime $$(( $(1) * $(FUZZ_ROUNDS) ))x -fuzz
fuzz: fuzz-small
	$(call FUZZ,3000) '^FuzzPlaceholderNumbers$$' ./internal/compile
	$(call FUZZ,3000) '^FuzzCaddyfile$$' ./internal/directive
	$(call FUZZ,3000) '^FuzzRate$$' ./internal/config/option
	for f in FuzzKey FuzzSplitKey; do $(call FUZZ,3000) "^$$f$$" ./internal/key || exit; done
	$(call FUZZ,3000) '^FuzzBucketRequest$$' ./internal/admin/adminapi
	$(call FUZZ,3000) '^FuzzConvert$$' ./internal/cli/convert
	$(call FUZZ,30000) '^FuzzFields$$' ./internal/request/field
	for f in FuzzJSON FuzzEncoded; do $(call FUZZ,30000) "^$$f$$" ./internal/rule/usage || exit; done

fuzz-small:
	$(call FUZZ,10000) '^FuzzReply$$' ./limiter
	$(call FUZZ,5000) '^FuzzStoredValue$$' ./limiter
	for f in FuzzCaddyLine FuzzCommonLine FuzzUnwrap; do \
		$(call FUZZ,150000) "^$$f$$" ./internal/cli/accesslog || exit; done
	$(call FUZZ,30000) '^FuzzReplyScanner$$' ./limiter/internal/redisscript

# Cause every fault for as long as test/faults/results.md says, and write its
# table: some fifty minutes.
faults: programs
	cd test/faults && go test -count=1 -timeout 90m -v . -long -table results.md

# Let three nodes run for long, with reloads and closed connections, and write what
# they held and admitted to test/faults/results.md.
SOAK_TIME = 10m
soak: programs
	cd test/faults && go test -count=1 -timeout 0 -v -run '^TestSoak$$' . -soak $(SOAK_TIME) -table results.md

# Make in dist what a release has: archives for all systems that Caddy is released for,
# with a bill of materials for each, an image, checksums and notes. Some twenty minutes
# the first time, for all systems; one does to see that it works:
# make dist RELEASE="-targets linux/amd64".
RELEASE =
dist:
	go -C tools/release run . -caddy $(CADDY_VERSION) $(RELEASE)

# All that a release does but to publish it. CI runs it on a tag only: it takes as long as
# make check and make dist.
release-check: check dist

# The tests start Redis servers of their own, the benchmarks a load generator,
# and the race detector needs a C compiler. All come from the distribution.
programs:
	@for p in redis-server wrk gcc jq; do command -v $$p >/dev/null || missing="$$missing $$p"; done; \
		test -z "$$missing" || { apt-get update && \
			apt-get install -y --no-install-recommends $$missing libc6-dev; }

# What test-operation needs besides. The packages of Prometheus and nginx would start
# services, so their programs are only unpacked, to .programs in this checkout.
BROWSERS = chromium chromium-browser google-chrome chrome-headless-shell
monitors:
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || \
		test -x .programs/usr/bin/promtool || { \
		mkdir -p .programs/unpacked && cd .programs && \
		{ apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } && \
		dpkg-deb -x prometheus_*.deb unpacked && mkdir -p usr/bin && \
		mv unpacked/usr/bin/prom* usr/bin/ && rm -r unpacked prometheus_*.deb; }
	@command -v nginx >/dev/null || test -x .programs/usr/bin/nginx || { \
		mkdir -p .programs/unpacked && cd .programs && \
		{ apt-get download nginx || { apt-get update && apt-get download nginx; }; } && \
		dpkg-deb -x nginx_*.deb unpacked && mkdir -p usr/bin && \
		mv unpacked/usr/sbin/nginx usr/bin/ && rm -r unpacked nginx_*.deb; }
	@for b in $(BROWSERS); do command -v "$$b" >/dev/null && exit; done; \
		apt-get update && apt-get install -y --no-install-recommends chromium

# The micro-benchmarks, five minutes, and whole requests beside a bare Caddy and the
# peers, fifteen.
bench: programs
	cd bench && go test -run '^$$' -bench . .

bench-e2e: programs
	cd bench && go run ./e2e

# Measure all that docs/internals/performance.md and bench/results.md have, and write it:
# two hours.
performance: programs
	cd bench && go run ./e2e ../docs/internals/performance.md results.md

# Measure what each algorithm and policy costs, and write the tables in
# docs/internals/algorithms.md: some two minutes.
costs: programs
	cd bench && go test -count=1 -v -run '^Test(Algorithm|Policy)Costs$$' . -table ../docs/internals/algorithms.md

# Draw docs/algorithms.svg from what the algorithms decide.
picture:
	go test -count=1 -run '^TestAlgorithmsPicture$$' ./limiter -args -picture

# Simulate many nodes that are far from Redis, and write the tables and the picture of
# docs/internals/simulation.md: some five minutes.
far: programs
	go test -count=1 -timeout 30m -v -run '^TestFarDocument$$' ./limiter -args -far ../docs/internals/simulation.md
