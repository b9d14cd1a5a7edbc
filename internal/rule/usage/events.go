package usage

import "bytes"

// events reads server-sent events, whose data are JSON texts.
type events struct {
	json  *scanner
	state eventState
	field [len(dataField)]byte // what was read of a field's name
	n     int                  // of field
	cr    bool                 // whether the last byte was a carriage return, which a line feed may follow
	data  bool                 // whether the event has data
	done  int                  // how many bytes of doneData its data begin with; -1 if they have others
	size  int64                // of all data
	kept  []byte               // the last event with data, if that was skipped
}

// eventState is what the next byte of events belongs to.
type eventState uint8

const (
	inField     eventState = iota // the beginning of a line
	beforeData                    // the space that may be before data
	inData                        // data, up to the end of the line
	inOtherLine                   // the rest of a line without data
)

const dataField = "data:"

// maxKept is how long an event is at most that is kept, as it may say that it is the last one. To
// read them as they come would take ten times as long as to skip them.
const maxKept = 512

// write reads more.
func (e *events) write(b []byte) { e.read(b, false) }

// end reads what was kept, when nothing more comes.
func (e *events) end() {
	if len(e.kept) > 0 {
		size := e.size
		e.json.reset()
		e.state, e.n, e.data, e.done, e.cr = inField, 0, false, 0, false
		e.read(e.kept, true)
		e.size = size
	}
}

// read reads more. It skips events unless it has done so.
func (e *events) read(b []byte, skipped bool) {
	for len(b) > 0 {
		if !skipped && e.between() {
			skipped, b = true, e.skip(b)
			continue
		}
		if e.cr {
			if e.cr = false; b[0] == '\n' {
				b = b[1:]
				continue
			}
		}
		end := lineEnd(b)
		line := b[:end]
		for e.state == inField && len(line) > 0 {
			e.field[e.n], line = line[0], line[1:]
			if e.n++; e.n == len(dataField) {
				if e.state = inOtherLine; string(e.field[:]) == dataField {
					e.state, e.data, e.json.whole, e.kept = beforeData, true, false, e.kept[:0]
				}
			}
		}
		if e.state == beforeData && len(line) > 0 {
			e.state, line = inData, bytes.TrimPrefix(line, []byte(" "))
		}
		if e.state == inData {
			e.size += int64(len(line))
			e.matchDone(line)
			e.json.write(line)
		}
		if end == len(b) {
			return
		}
		e.endLine(e.state == inField && e.n == 0)
		e.cr = b[end] == '\r'
		b = b[end+1:]
	}
}

// between reports whether no event has begun, or none of its data.
func (e *events) between() bool { return e.state == inField && e.n == 0 && !e.data && !e.cr }

// skip skips the events that end in b, if none of them has any of the numbers, as most have none.
func (e *events) skip(b []byte) []byte {
	end := bytes.LastIndex(b, []byte("\n\n"))
	if end < 0 || bytes.IndexByte(b, '\r') >= 0 {
		return b
	}
	end += len("\n\n")
	last, before, size := lastEvent(b[:end])
	switch {
	case e.json.plan.mayBeIn(b[:last]):
		return b
	case end-last > maxKept, e.json.plan.mayBeIn(b[last:end]):
		e.size += before
		return b[last:]
	case last < end:
		e.kept = append(e.kept[:0], b[last:end]...)
	}
	e.size += size
	return b[end:]
}

// lastEvent returns the index of the last event with data in b, which consists of whole events, or
// the length of b without any; and how long the data are before it, and of all.
func lastEvent(b []byte) (index int, before, size int64) {
	index = len(b)
	begin, end, data := 0, 0, int64(-1) // of an event
	for line := range bytes.Lines(b) {
		end += len(line)
		if text, ok := bytes.CutPrefix(line, []byte(dataField)); ok {
			data = max(data, 0) + int64(len(bytes.TrimPrefix(bytes.TrimSuffix(text, []byte("\n")), []byte(" "))))
		}
		if len(line) > 1 {
			continue
		}
		if data >= 0 {
			index, before, size = begin, size, size+data
		}
		begin, data = end, -1
	}
	return index, before, size
}

// matchDone goes on with comparing the data of an event with doneData, with which they have to begin.
func (e *events) matchDone(data []byte) {
	for _, c := range data {
		switch {
		case e.done < 0 || e.done == len(doneData):
			return
		case c == doneData[e.done]:
			e.done++
		default:
			e.done = -1
		}
	}
}

// endLine ends a line. An empty one ends the event.
func (e *events) endLine(empty bool) {
	switch {
	case empty && e.data:
		if e.done == len(doneData) {
			e.json.whole = true
		}
		e.data, e.done = false, 0
		e.json.reset()
	case e.state == inData:
		e.json.write([]byte{'\n'}) // the next line goes on with the text
	}
	e.state, e.n = inField, 0
}

// lineEnd returns the index of the first end of a line in b, or its length.
func lineEnd(b []byte) int {
	if i := bytes.IndexByte(b, '\n'); i >= 0 {
		b = b[:i]
	}
	if i := bytes.IndexByte(b, '\r'); i >= 0 {
		return i
	}
	return len(b)
}
