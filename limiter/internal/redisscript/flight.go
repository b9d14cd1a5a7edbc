package redisscript

// flight is what is in flight on a connection, in the order of the replies.
type flight struct {
	invocations []*invocation
	head        int
}

// push adds the latest.
func (f *flight) push(in *invocation) {
	if f.head > 0 && len(f.invocations) == cap(f.invocations) {
		n := copy(f.invocations, f.invocations[f.head:])
		clear(f.invocations[n:])
		f.invocations, f.head = f.invocations[:n], 0
	}
	f.invocations = append(f.invocations, in)
}

// first returns the one that is answered next, or nil.
func (f *flight) first() *invocation {
	if f.head == len(f.invocations) {
		return nil
	}
	return f.invocations[f.head]
}

// blocked reports whether the latest has not been written yet.
func (f *flight) blocked() bool {
	return f.head < len(f.invocations) && f.invocations[len(f.invocations)-1].sent.IsZero()
}

// pop removes the first.
func (f *flight) pop() {
	f.invocations[f.head] = nil
	if f.head++; f.head == len(f.invocations) {
		f.invocations, f.head = f.invocations[:0], 0
	}
}

// all removes and returns all.
func (f *flight) all() []*invocation {
	all := f.invocations[f.head:]
	f.invocations, f.head = nil, 0
	return all
}
