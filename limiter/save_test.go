package limiter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
)

// savedEpoch is the time of day at which the clocks of these tests begin, in µs.
const savedEpoch = 1_790_000_000_123_456

// limitsToSave has limits of all algorithms but that of bans, see bucketsToSave.
func limitsToSave() []Limit {
	countDenied := func(l Limit) Limit { l.CountDenied = true; return l }
	return []Limit{
		Per(3, time.Second), Per(10, 7*time.Second).WithBurst(4), {Size: 9, DripInterval: 700 * time.Millisecond, DripSize: 2},
		{Size: 5, DripInterval: time.Second, DripSize: 3, Aligned: true, Phase: 300 * time.Millisecond},
		FixedWindow(4, 5*time.Second), ClockWindow(4, 10*time.Second, time.UnixMicro(savedEpoch)),
		ClockWindow(50, 31*24*time.Hour, time.Date(2026, 9, 1, 0, 0, 0, 0, time.UTC)),
		SlidingWindow(6, 8*time.Second), SlidingLog(6, 8*time.Second), SlidingLog(40, time.Minute),
		countDenied(SlidingLog(5, 9*time.Second)), countDenied(Per(3, 2*time.Second)), countDenied(FixedWindow(3, 4*time.Second)),
		WarmingUp(5, time.Second, 4*time.Second),
	}
}

// bucketsToSave returns the buckets of a request to one of these limits. One of them bans.
func bucketsToSave(limits []Limit, n int, key string, cost int64) []Bucket {
	b := Bucket{Name: fmt.Sprint(n), Key: key, Limit: limits[n], Cost: cost}
	if n < 3 { // keys share buckets if there are more than two
		b.ShareKey, b.MaxKeys = "all", 2
	}
	if n != 4 {
		return []Bucket{b}
	}
	ban := BanAfter(2, 3*time.Second, 9*time.Second, 30*time.Second)
	return []Bucket{b, {Name: b.Name + "@ban", Key: key, Limit: ban, Cost: 1, Watches: 1}}
}

// memoryAt returns a Memory whose clock shows what *now does less start: clocks of processes
// begin near 0. now and start are times of day in µs.
func memoryAt(now *int64, start int64) *Memory {
	m := NewMemoryWithClock(func() time.Duration { return time.Duration(*now-start) * time.Microsecond })
	m.unix = func(int64) int64 { return *now }
	return m
}

// reloaded returns what m saves, loaded into another Memory.
func reloaded(t interface{ Fatal(...any) }, m, into *Memory) *Memory {
	var file bytes.Buffer
	saved, err := m.Save(&file)
	if err != nil {
		t.Fatal(err)
	}
	loaded, err := into.Load(&file)
	if err != nil || !loaded.At.Equal(saved.At) || loaded.Buckets > saved.Buckets {
		t.Fatal(err, loaded, saved)
	}
	return into
}

// taken returns what m decides on a request to some buckets.
func taken(m *Memory, buckets ...Bucket) []Decision {
	d, err := m.Take(context.Background(), Request{Buckets: buckets}, nil)
	if err != nil {
		panic(err)
	}
	return d
}

// Guards that a Memory which is saved and loaded, at any moment and again and again, decides to
// the microsecond as one that lives on.
func TestMemorySavedDecidesAsBefore(t *testing.T) {
	t.Parallel()
	denied, restarts, shared := 0, 0, 0
	checkTraces(t, 15, func(t *rapid.T) {
		now := int64(savedEpoch)
		lives, ends := memoryAt(&now, now-1), memoryAt(&now, now-1)
		limits := limitsToSave()
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.SampledFrom([]int64{0, 1, 999, 100_000, 1_000_000, 3_333_333, 20_000_000}).Draw(t, "gap")
			if rapid.IntRange(0, 5).Draw(t, "restart") == 0 {
				var file bytes.Buffer
				saved, err := ends.Save(&file)
				if err != nil {
					t.Fatal(err)
				}
				now += rapid.SampledFrom([]int64{0, 1, 50_000, 2_500_000, 40_000_000}).Draw(t, "pause")
				ends = memoryAt(&now, now-rapid.SampledFrom([]int64{1, 5, 1_000_000}).Draw(t, "uptime"))
				if loaded, err := ends.Load(&file); err != nil || !loaded.At.Equal(saved.At) {
					t.Fatal(err, loaded, saved)
				}
				restarts++
			}
			// Until they are swept, drained buckets count for sharing or not by which table they are in,
			// which is random.
			removeDrained(lives)
			removeDrained(ends)
			buckets := drawToSave(t, limits)
			want, got := taken(lives, buckets...), taken(ends, buckets...)
			if !slices.Equal(got, want) {
				t.Fatalf("%+v: got %+v, want %+v", buckets, got, want)
			}
			if slices.ContainsFunc(want, func(d Decision) bool { return d.Denied }) {
				denied++
			}
		}
		shared += int(ends.shared.Load())
		removeDrained(lives)
		removeDrained(ends)
		want, _ := counted(lives)
		if got, all := counted(ends); got != want || all != ends.Len() {
			t.Fatalf("%d buckets, want %d; counted as %d, want %d", got, want, ends.Len(), all)
		}
	})
	t.Logf("%d restarts, %d requests denied, %d buckets shared", restarts, denied, shared)
	if restarts == 0 || denied == 0 || shared == 0 {
		t.Error("this shows nothing")
	}
}

// drawToSave returns the buckets of a request to some of the limits.
func drawToSave(t *rapid.T, limits []Limit) (buckets []Bucket) {
	key := fmt.Sprint(rapid.IntRange(0, 4).Draw(t, "key"))
	for range rapid.IntRange(1, 3).Draw(t, "limits") {
		n := rapid.IntRange(0, len(limits)-1).Draw(t, "limit")
		if !slices.ContainsFunc(buckets, func(b Bucket) bool { return b.Name == fmt.Sprint(n) }) {
			buckets = append(buckets, bucketsToSave(limits, n, key, rapid.Int64Range(0, 3).Draw(t, "cost"))...)
		}
	}
	return buckets
}

// removeDrained removes all buckets that have drained.
func removeDrained(m *Memory) {
	now := m.clock().Microseconds()
	for _, p := range m.directory.Load().all {
		for i := range p.tables {
			m.dropAllEntries(p, uint64(i), now)
			m.count(p, -p.tables[i].rebuild(p.tables[i].live(now), now))
			m.dropAllEntries(p, uint64(i), now)
		}
	}
}

// counted counts the buckets in m, and as how many they count.
func counted(m *Memory) (buckets, all int) {
	for _, p := range m.directory.Load().all {
		for i := range p.tables {
			buckets += p.tables[i].used
			if p.entries != nil {
				for _, g := range p.entries[i] {
					all += int(g.Counted)
				}
			}
		}
	}
	return buckets, buckets + all
}

// Guards what counts as passed: the time between, by the time of day, and none if that was set
// back.
func TestMemorySavedWhileClockIsSet(t *testing.T) {
	t.Parallel()
	const year = 365 * 24 * time.Hour
	for _, tc := range []struct{ set, left time.Duration }{
		{0, time.Hour}, {-24 * time.Hour, time.Hour}, {-20 * year, time.Hour}, {30 * time.Minute, 30 * time.Minute},
		{90 * time.Minute, 0}, {200 * year, 0},
	} {
		before, after := int64(savedEpoch), savedEpoch+tc.set.Microseconds()
		b := Bucket{Name: "a", Key: "k", Limit: FixedWindow(1, time.Hour), Cost: 1}
		m := memoryAt(&before, before)
		taken(m, b)
		l, err := reloaded(t, m, memoryAt(&after, after)).Peek(context.Background(), b)
		if err != nil || l.Clear != tc.left {
			t.Errorf("set by %v: %v left, want %v, %v", tc.set, l.Clear, tc.left, err)
		}
	}
}

// Guards that limits find their buckets which share tables with others because there are too
// many limits of one name, or too many in all; and that as many can be loaded as there may be.
func TestMemorySavedMixed(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	now := int64(savedEpoch)
	many := func(i int) Bucket {
		return Bucket{Name: fmt.Sprint("n", i/maxShapes), Key: "k", Limit: FixedWindow(5, time.Hour+time.Duration(i)*time.Second), Cost: 2}
	}
	shapes := func(i int) Bucket {
		return Bucket{Name: "a", Key: "k", Limit: FixedWindow(5, time.Duration(100+i)*time.Second), Cost: 2}
	}
	for _, tc := range []struct {
		name string
		n    int
		of   func(int) Bucket
	}{{"shapes", 100, shapes}, {"names", maxPartitions + 20, many}} {
		m := memoryAt(&now, now-1)
		for i := range tc.n {
			taken(m, tc.of(i))
		}
		now += 130e6 // some of the shapes have drained, and have no tables any more
		n := reloaded(t, m, memoryAt(&now, now-1))
		for i := range tc.n {
			if got, want := taken(n, tc.of(i)), taken(m, tc.of(i)); !slices.Equal(got, want) {
				t.Errorf("%s %d: got %+v, want %+v", tc.name, i, got, want)
			}
		}
	}
}

// Guards that more buckets than there is room for are evicted as after a reload: the emptiest
// first, and none of a limit that evicts none.
func TestMemorySavedWithMoreThanMaxKeys(t *testing.T) {
	t.Parallel()
	now := int64(savedEpoch)
	bucket := func(i int) Bucket {
		return Bucket{Name: "a", Key: fmt.Sprint(i), Limit: FixedWindow(5, time.Hour), Cost: int64(1 + i%5)}
	}
	keeps := func(i int) Bucket {
		b := bucket(i)
		b.Name, b.ShareKey, b.MaxKeys = "b", "all", 5000
		return b
	}
	m := memoryAt(&now, now-1)
	for i := range 5000 {
		taken(m, bucket(i))
		taken(m, keeps(i))
	}
	n := memoryAt(&now, now-1)
	n.SetMaxKeys(7000)
	reloaded(t, m, n)
	for range 20 {
		now += 1e6
		n.Sweep()
	}
	full, kept := 0, 0
	for i := range 5000 {
		for b, count := range map[string]*int{"a": &full, "b": &kept} {
			at := bucket(i)
			at.Name = b
			if l, _ := n.Peek(context.Background(), at); l.Units > 0 && (b == "b" || l.Units == 5) {
				*count++
			}
		}
	}
	if n.Len() > 7000 || full < 900 || kept != 5000 {
		t.Errorf("%d buckets; %d of 1000 full ones and %d of 5000 that are not evicted", n.Len(), full, kept)
	}
}

// Guards when saving again is worth it: not if nothing was decided since.
func TestMemoryUnsaved(t *testing.T) {
	t.Parallel()
	now := int64(savedEpoch)
	m := memoryAt(&now, now-1)
	want := func(step string, want time.Duration) {
		t.Helper()
		if got := m.Unsaved(); got != want {
			t.Errorf("%s: %v, want %v", step, got, want)
		}
	}
	b := Bucket{Name: "a", Key: "k", Limit: Per(60, time.Hour), Cost: 1}
	want("unused", 0)
	taken(m, b)
	want("charged", time.Minute)
	now += 10e6
	want("later", 50*time.Second)
	taken(m, b)
	_, _ = m.Save(io.Discard)
	want("charged just before it was saved", 110*time.Second)
	now += 10e6
	_, _ = m.Save(io.Discard)
	want("saved", 0)
	now += 10e6
	taken(m, b)
	want("charged again", 150*time.Second)
	now += 10e6
	n := reloaded(t, m, memoryAt(&now, now-1e6))
	if got := n.Unsaved(); got != 0 {
		t.Errorf("loaded: %v", got)
	}
	long := Bucket{Name: "c", Key: "k", Limit: Per(1, time.Hour), Cost: 1}
	taken(m, long)
	_, _ = m.Save(io.Discard)
	now += 10e6
	_, _ = m.Reset(context.Background(), long)
	want("reset what was saved", time.Hour-10*time.Second)
	now += 10e6
	_, _ = m.Save(io.Discard)
	want("saved without it", 0)
	now += 10e6
	taken(m, b)
	want("charged after that", 170*time.Second)
}

// Guards that all that changes buckets makes saving worth it again, also if nothing is decided
// meanwhile.
func TestMemoryUnsavedChanges(t *testing.T) {
	t.Parallel()
	ctx, b := context.Background(), Bucket{Name: "a", Key: "k", Limit: Per(1, time.Hour).WithBurst(9), Cost: 1}
	for name, change := range map[string]func(*Memory, *Held) error{
		"decided": func(m *Memory, _ *Held) error { taken(m, b); return nil },
		"settled": func(_ *Memory, held *Held) error { held.Settle(0, 5); return nil },
		"reset":   func(m *Memory, _ *Held) error { _, err := m.Reset(ctx, b); return err },
		"banned": func(m *Memory, _ *Held) error {
			return m.Ban(ctx, Bucket{Name: "b", Key: "k", Limit: BanAfter(9, time.Second, time.Hour, time.Hour)}, time.Hour)
		},
	} {
		now := int64(savedEpoch)
		m := memoryAt(&now, now-1)
		taken(m, b)
		holds, held := b, new(Held)
		holds.Hold = true
		if _, err := m.Take(ctx, Request{Buckets: []Bucket{holds}, Held: held}, nil); err != nil {
			t.Fatal(err)
		}
		now += 10e6
		_, _ = m.Save(io.Discard)
		now += 10e6
		if before := m.Unsaved(); before != 0 {
			t.Errorf("before it is %s: %v", name, before)
		}
		if err := change(m, held); err != nil {
			t.Fatal(err)
		}
		if got := m.Unsaved(); got < 50*time.Minute {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Guards that tables have no room for the buckets that have drained since they were saved.
func TestMemorySavedWithoutDrained(t *testing.T) {
	t.Parallel()
	now := int64(savedEpoch)
	m := memoryAt(&now, now-1)
	for i := range 100_000 {
		taken(m, Bucket{Name: "a", Key: fmt.Sprint(i), Limit: Per(60, time.Hour), Cost: 1 + int64(i%100/99)})
	}
	var file bytes.Buffer
	if _, err := m.Save(&file); err != nil {
		t.Fatal(err)
	}
	now += 90e6
	n := memoryAt(&now, now-1)
	if loaded, err := n.Load(&file); err != nil || loaded.Buckets != 1000 || n.Len() != 1000 {
		t.Fatal(err, loaded, n.Len())
	}
	room := 0
	for i := range n.directory.Load().all[0].tables {
		room += len(n.directory.Load().all[0].tables[i].slots)
	}
	if room > 4000 {
		t.Errorf("there is room for %d buckets", room)
	}
}

// Guards that a Memory in use is not overwritten, and that what can't be read or written is told.
func TestMemorySavedErrors(t *testing.T) {
	t.Parallel()
	m := NewMemory()
	var file bytes.Buffer
	if _, err := m.Save(&file); err != nil {
		t.Fatal(err)
	}
	taken(m, Bucket{Name: "a", Key: "k", Limit: Per(60, time.Hour), Cost: 1})
	if _, err := m.Load(&file); err == nil || errors.Is(err, ErrNotSaved) {
		t.Errorf("loading while in use: %v", err)
	}
	if _, err := m.Save(failing{}); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("saving: %v", err)
	}
	for _, head := range []string{"", savedMagic + "\x01\x00\x00\x00" + strings.Repeat("k", 16)} {
		if _, err := NewMemory().Load(io.MultiReader(strings.NewReader(head), failing{})); !errors.Is(err, io.ErrNoProgress) || errors.Is(err, ErrNotSaved) {
			t.Errorf("loading: %v", err)
		}
	}
	for text, want := range map[string]string{
		"":                              "not saved buckets, but something else",
		savedMagic:                      "not saved buckets of format 1, but of 0",
		savedMagic + "\x02\x00\x00\x00": "not saved buckets of format 1, but of 2",
		"{}":                            "not saved buckets, but something else",
		savedMagic + "\x01\x00\x00\x00" + strings.Repeat("k", 30): "not saved buckets: the checksum is wrong",
	} {
		if _, err := NewMemory().Load(strings.NewReader(text)); !errors.Is(err, ErrNotSaved) || err.Error() != want {
			t.Errorf("loading %q: %v, want %s", text, err, want)
		}
	}
}

// failing fails to read and to write.
type failing struct{}

func (failing) Read([]byte) (int, error)  { return 0, io.ErrNoProgress }
func (failing) Write([]byte) (int, error) { return 0, io.ErrNoProgress }

// savedAll returns what a Memory saves that has two buckets of each limit, and buckets of so many
// other limits of one name.
func savedAll(t testing.TB, shapes int) []byte {
	m := NewMemory()
	limits := limitsToSave()
	for i := range limits {
		for k := range 2 {
			taken(m, bucketsToSave(limits, i, fmt.Sprint(k), 1)...)
		}
	}
	for i := range shapes {
		taken(m, Bucket{Name: "a", Key: "k", Limit: SlidingLog(5, time.Duration(100+i)*time.Second), Cost: 1})
	}
	var file bytes.Buffer
	if _, err := m.Save(&file); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

// Guards that nothing is loaded of what was cut anywhere, or has a bit changed.
func TestMemoryLoadsNothingDamaged(t *testing.T) {
	t.Parallel()
	load := func(b []byte) error {
		m := NewMemory()
		_, err := m.Load(bytes.NewReader(b))
		if err != nil && (m.Len() != 0 || len(m.directory.Load().all) != 0 || !errors.Is(err, ErrNotSaved)) {
			t.Fatal("changed", err)
		}
		return err
	}
	b := savedAll(t, 0)
	if err := load(b); err != nil {
		t.Fatal(err)
	}
	for n := range b {
		if load(b[:n]) == nil {
			t.Fatalf("cut at %d", n)
		}
		c := bytes.Clone(b)
		c[n] ^= 1 << rand.IntN(8)
		if load(c) == nil {
			t.Fatalf("changed at %d", n)
		}
	}
	if load(append(bytes.Clone(b), 0)) == nil {
		t.Fatal("a byte more")
	}
}

// Guards that of what was damaged no more is read than the piece where that is, however much follows:
// a file with a hole may seem to have any size.
func TestMemoryLoadEndsWhereDamaged(t *testing.T) {
	t.Parallel()
	m := NewMemory()
	for i := range 20_000 {
		taken(m, Bucket{Name: "a", Key: fmt.Sprint(i), Limit: Per(60, time.Hour), Cost: 1})
	}
	var file bytes.Buffer
	if _, err := m.Save(&file); err != nil || file.Len() < 6*savedPiece {
		t.Fatal(file.Len(), err)
	}
	whole := file.Bytes()
	for _, right := range []int{savedHead, savedHead + 4, savedHead + 1000, 3 * savedPiece, len(whole) - 9, len(whole) - 4, len(whole)} {
		for _, fill := range []byte{0, 1, 0xff} {
			r := &endless{right: whole[:right], fill: fill}
			_, err := NewMemory().Load(r)
			if !errors.Is(err, ErrNotSaved) || r.read > right+2*savedPiece {
				t.Errorf("%d bytes are right, then all are %d: %d were read, %v", right, fill, r.read, err)
			}
		}
	}
}

// endless reads some bytes, and then the same one for ever.
type endless struct {
	right []byte
	fill  byte
	read  int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.right)
	e.right = e.right[n:]
	for i := range p[n:] {
		p[n+i] = e.fill
	}
	e.read += len(p)
	return len(p), nil
}

// Guards that no contents can do harm that have the right checksum: what is loaded is used, swept
// and saved without a panic.
func TestMemoryLoadsAnything(t *testing.T) {
	t.Parallel()
	racetest.SingleGoroutine(t)
	file, loaded, refused := savedAll(t, 0), 0, 0
	rest, err := readPieces(bytes.NewReader(file[savedHead:]), crc32.Checksum(file[:savedHead], castagnoli))
	if err != nil {
		t.Fatal(err)
	}
	original := slices.Concat(file[:savedHead], rest)
	limits := limitsToSave()
	for range max(1000, *minTraces) {
		b := bytes.Clone(original)
		for range 1 + rand.IntN(3) {
			at := rand.IntN(len(b))
			switch rand.IntN(3) {
			case 0:
				b[at] = byte(rand.Uint32())
			case 1:
				b[at] ^= 1 << rand.IntN(8)
			default:
				odd := []byte{0, 0xff, 0x7f, 0x80}[rand.IntN(4)]
				for i := range min(8, len(b)-at) {
					b[at+i] = odd
				}
			}
		}
		copy(b[12:28], original[12:28]) // the key, with which buckets are found
		var file bytes.Buffer
		s := saver{w: &file, buf: b[:savedHead:savedHead]}
		s.head()
		s.buf = b[savedHead:]
		s.flush()
		s.piece(nil)
		m := NewMemory()
		if _, err := m.Load(&file); err != nil {
			refused++
			continue
		}
		loaded++
		for i := range limits {
			for k := range 3 {
				taken(m, bucketsToSave(limits, i, fmt.Sprint(k), 1)...)
			}
		}
		m.sweepTables(m.clock().Microseconds(), sweepSteps)
		if _, err := m.Save(io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d loaded, %d refused", loaded, refused)
	if loaded == 0 || refused == 0 {
		t.Error("this shows nothing")
	}
}
