package limiter

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// What is in flight, and what servers hold for this process, is one machine under one lock,
// traffic.mu (of a store without a fallback, that of its ledger). This file has its states, flights.go counts, accounts.go changes accounts, and
// above these fallback.go follows levels, renewal.go sends what accounts have, ledger.go decides
// what is held, and report.go reports. Each calls only those before it.
//
//	state of     is           from                                  until
//	query        gathering    the first unit to report              it is sent
//	             asking       it is sent                            there is an answer, or it is given up: ended
//	             holding      its request is admitted               that is settled: ended
//	             owing        a charge is not known to its server   it is, or is charged here; then it is not counted
//	             ended        nothing follows from its answer
//	reservation  requested    its call is sent                      admitted, refused or lost
//	             running      a server or this process admits it    its request is settled
//	account      new          receipt -1                            a hold is admitted
//	             open         the receipt of a server               idle, or in doubt
//	             in doubt     the server may have something else    next renews it
//	             renewed      receipt 0, with a renewal             that is answered: open
//	             idle         nothing is left to be settled         the next request

// fallback decides requests in this process while their server is unavailable,
// such that one process alone never admits more than its buckets allow, whatever
// the server answers, and when, and whatever it has lost. With several processes,
// each knows only what it has admitted itself and what the server has reported.
//
// The memory holds each bucket's level as this process knows it: never less than
// the server last reported. Every admission of this process is either in that
// level or in flight. It follows that:
//
//   - A request that is decided here must fit next to the level and everything in
//     flight. It makes the bucket dirty: the server does not know of it. So does a
//     denial, because the server may have lost what the bucket was full of. All
//     buckets become dirty when a server is found to have restarted.
//   - All buckets become dirty when something is first sent to a store that keeps
//     its buckets at another location than the one before, see takeLead.
//   - A request for a dirty bucket reports the level that the bucket holds, and
//     how many units are in flight next to it, for which there must be room too. If nothing
//     was decided here, both sides know the same charges, and their times differ only by
//     network delay.
//   - The answer makes the bucket clean, unless something was decided here while
//     the request was in flight: then the charge is added to the level here.
//   - A query that was given up is no longer in flight. A late answer to it changes
//     nothing.
//   - An answer that is newer than all others for a clean bucket (see latest) is
//     authoritative, even if its level is lower: then somebody has deleted the key,
//     or Redis has.
//   - A bucket that the memory evicts is gone, even if a server knew of it; it is
//     removed from the server too, see removals.
type fallback struct {
	*traffic
	memory   *Memory
	timeout  time.Duration // how late an answer may arrive
	removals removals
	original // f as the memory knows it
}

// traffic tracks the requests in flight of all fallbacks that share a memory.
// While one store replaces another, there are two.
type traffic struct {
	// Held while a query starts or stops being in flight and while something is
	// decided here, so that each sees the other. The memory's table locks are
	// taken while holding it.
	mu       sync.Mutex
	inFlight *query      // the latest one; the head of a list, for what concerns a whole server
	flights  flights     // the same by bucket, for all else, see flights.go
	sent     uint64      // number of queries sent
	open     []*original // the fallbacks that are not closed, the newest last
	resets   []*emptying // those in flight
}

// emptying is a call in flight that empties a bucket. The server may run it at any time until
// it answers, and has to be thought not to know of what is charged meanwhile.
type emptying struct {
	hash     uint64
	units    int64 // charged since it was sent, except for those in flight
	gathered int64 // the same, to be reported
}

// flights counts what is in flight for each bucket. None of its methods takes longer when
// more is in flight: each finds one bucket, and reads or changes what is counted there.
type flights struct {
	of   map[uint64]*flight // by the hash of the bucket
	last uint64             // number of the last event: a query that set out, or something that met those in flight
}

// flight is what is in flight for one bucket. A query counts once for each time that it
// queries the bucket.
type flight struct {
	queries   int // how many there are
	gathering int // how many of them have not been sent, see report.go

	units  total       // of all
	held   []heldTotal // of those that the servers of a fallback count as held themselves
	unsent total       // of those that have not been sent

	lost      int // queries of which the servers that lead may not know
	doubts    int // those of which a server may have charged what is charged here too, see isInDoubt
	reporting int // queries that report a level

	crossed [own + 1]meeting // when something was last decided here that made the bucket as dirty as that
	emptied meeting          // when it was last emptied, and the queries that report what it held before

	latest latest
}

// latest is the newest answer about a bucket since something has been in flight for it. All
// others before that were read before what is in flight set out.
type latest struct {
	server *redisscript.Server
	order  uint64 // of the query that it answers, see query
	by     uint64 // number of queries sent when it was read
}

// meeting counts the queries that were in flight at a moment and still are.
type meeting struct {
	at   uint64 // number of the event
	left int
}

// heldTotal is a total of the units that the servers of a fallback hold.
type heldTotal struct {
	by *fallback
	total
}

// total is a sum of units, which is larger than an int64 if many requests request many.
type total struct{ high, low uint64 }

// ledger has what the requests of a store hold in its servers: an account for each bucket, by
// the name of its key. While there are any, a goroutine renews them, and sends again what was
// not answered.
type ledger struct {
	store   *servers
	process int64 // names this store in servers; random

	mu      sync.Mutex // of a store without a fallback, see lock
	all     map[string]*account
	past    []*account // that are not in all any more, the latest last, see recall
	number  int64      // the latest of an account
	running bool
	closed  bool // whether nothing is sent any more
}

// account is what this process holds of one bucket in a server, as held.lua says: it sends the
// server totals, and may do so as often as it likes. When it is in doubt about what the
// server has, it renews the account: it opens another one with all that it holds. Both are sent
// until they are answered. The lock of the ledger guards it.
type account struct {
	ledger *ledger
	key    string // by which the ledger has it
	bucket Bucket
	open   map[*reservation]struct{} // what is held, or has been requested

	mayExist  bool // whether a server may know of it, or of one that it represents
	number    int64
	receipt   int64  // -1 until a hold is admitted
	totals           // since it was opened
	sent      totals // in the latest call
	confirmed totals // what the server has answered to

	settling int      // how many settlements are in flight
	queued   bool     // whether one of them has yet to be sent, with the totals of then
	doubt    bool     // whether it is to be renewed
	lost     bool     // since the server may not have what it held
	renewal  *renewal // until it is answered
	paid     bool     // whether the server is to charge what requests in progress hold, see close
	recalled bool     // whether it had ended, and is renewed in case that its server does not know
	owed     *query   // in flight for what is charged and not answered, see fallback.owe

	heard time.Duration // when the last call was sent that the server has answered
}

// totals are how many units the requests of an account have released and been charged.
type totals struct{ ended, charged int64 }

// accountName names an account of a process.
type accountName struct{ number, receipt int64 }

// reservation is what a request holds of one bucket in a server, or in this process if that
// did not answer, from its decision until it is settled. Meanwhile a query of its own, which is
// never sent, counts as in flight, so that the fallback leaves room for it.
type reservation struct {
	store  *servers
	query  *query
	bucket Bucket

	// The lock of the store's ledger guards these.
	account  *account
	number   int64         // of the account for which it was sent; 0 if it was not
	sent     time.Duration // when
	running  bool
	counted  bool // whether the account has it, or its renewal
	inServer bool // whether a server has it, unless its account is in doubt
	paid     bool // whether it has lapsed, so that it was charged
}

// query queries a server about the buckets of a request: one group of core.lua, in an
// invocation of its own or in a batch with others. It is encoded when it is sent, and
// again each time that it is.
type query struct {
	redisscript.Call
	what    byte // what to do with the buckets
	buckets []bucketQuery
	account *account // the one that it settles, renews or owes
	number  int64    // of that when it was made
	ahead   int64    // how many units may be leased before there is room for them
	least   int64    // how many are to be leased at least, or none

	// State of the fallback, guarded by its lock.
	server     *redisscript.Server // the server that it was last sent to
	order      uint64              // its number among all queries sent
	stage      stage
	began      uint64    // when it began to count as in flight, see flights
	counted    bool      // whether it does
	holder     *fallback // whose servers count its units as held; nil if none do
	lost       bool      // whether the servers that lead may not know of it: one has restarted since, or it was sent to others
	failed     bool      // whether its answer was no reply, or late, which its request is yet to find
	next, prev *query

	answer struct { // to it, if a request waits for it
		outcomes []outcome
		corrupt  bool
		err      error
	}

	// Memory for Keys and Arg. The next query that reuses q overwrites it.
	names, group []byte
	ends         []int // where each key ends in names
}

// stage is how far a query is.
type stage uint8

const (
	asking    stage = iota // its answer decides
	gathering              // it has not been sent, and its units become more, see report.go
	holding                // its units are held until the request is settled
	owing                  // its units are charged, and its server may not know that yet: it is never sent
	ended                  // nothing follows from its answer: it was given up, or never to decide
)

// bucketQuery is the part of a query about one bucket.
type bucketQuery struct {
	limit bucket.Limit
	cost  int64
	local localLevel // what is reported of it
	held  *heldCost  // if its cost is only held, or it costs nothing and reads what is held

	dryRun  bool  // whether its denial denies nothing
	borrows bool  // whether a pool may have room instead
	pool    bool  // whether it is one
	watches uint8 // how many of the buckets right before this one it watches
	keeps   bool

	// How dirty the bucket is once the server has answered, because of what was
	// decided here while the query was in flight, or others that still are.
	crossed dirtiness
	alone   uint16 // of the table when it was sent, see tableMark

	// For the fallback.
	location        // its location in the memory
	key      string // its Redis key
	maxKeys  int
}

// heldCost is the cost of a bucket that is only held, with what is requested of its account.
type heldCost struct {
	charge      int64        // how many units are charged when they are settled
	reservation *reservation // what holds them
	process     int64
	accountName
	totals
	known         int64       // how many of those that are charged, of the account or, to renew, of the one before, are in the level here
	before        accountName // to renew: the account before
	beforeCharged int64       // and how many units its requests have been charged
}

// localLevel is what a query reports about a bucket: its level in this process.
type localLevel struct {
	bucket.Ahead           // its level
	inFlight     int64     // units that are in flight next to it
	dirty        dirtiness // if clean, no level is reported, and inFlight is what has not been reported
}

// removals collects buckets to remove from a store's servers.
type removals struct {
	send func([]removal)

	mu      sync.Mutex
	waiting []removal
	sending int // number of calls of send in flight
	timed   bool
}

// renewal is the renewal of an account, which represents the one before.
type renewal struct {
	units   int64
	running []*reservation // what is held for certain
	before  accountName
	charged int64         // in total, by requests of the account before
	owed    int64         // how much of that the server has not answered to
	heard   time.Duration // of that account
	sent    bool          // whether it is in flight
	tries   int           // how often it was sent
	grew    bool          // whether more was held in the new account before it was answered
}

// settlement is what follows from the outcome of a settlement or a renewal: of what is owed, how
// much the server has charged, and how much it has not and never will, or may have
// charged with an account that is gone; and how much more it has charged, since it had lapsed.
type settlement struct {
	known, unknown, lapsed int64

	doubtless bool // whether nothing that is still owed may have been charged
	doubtful  bool // whether it may have charged any of it, unless that is still known
}

// reports is what one store has to report. The fallback's lock guards it.
type reports struct {
	store   *servers
	of      map[uint64]*report // by the hash of the bucket in the fallback's memory
	queue   []*report          // those that are due at some time
	next    int64              // when the first of them is, as far as run knows
	swept   int64              // when idle ones were last removed
	running bool
	wake    chan struct{} // for run
}

// report is what is to be reported of one bucket. Times are in µs, on the store's clock.
type report struct {
	next  *query // gathers what is to be sent; nil if nothing is
	due   int64  // when that is
	sent  *query // has been sent and not answered; nil if nothing has
	heard int64  // when the server last reported the level, or failed to
}

// servers are the servers of a store, and what calls to them need and leave behind.
type servers struct {
	keys      keys
	timeout   time.Duration
	fallback  *fallback // nil if there is none
	client    client
	location  string               // identifies where the buckets are, see RedisOptions.location
	clock     func() time.Duration // never goes back
	closed    atomic.Bool
	ledger    ledger
	denyCache *denyCache
}

// client runs the script on the servers, as a [redisscript.Client] does. Tests have others.
type client interface {
	Connect()
	Do(end redisscript.Deadline, call *redisscript.Call) (*redisscript.Server, error)
	Submit(end redisscript.Deadline, call *redisscript.Call) error
	OneServer() bool
	Stats() []redisscript.Stats
	Close() error
}
