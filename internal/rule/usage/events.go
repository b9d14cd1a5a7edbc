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

// write reads more.
func (e *events) write(b []byte) {
	for skipped := false; len(b) > 0; {
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
					e.state, e.data = beforeData, true
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
// It leaves the last one with data, which may say that it is the last of all.
func (e *events) skip(b []byte) []byte {
	end := bytes.LastIndex(b, []byte("\n\n"))
	if end < 0 {
		return b
	}
	last := bytes.LastIndex(b[:end], []byte("\n"+dataField)) + 1
	skipped := b[:bytes.LastIndex(b[:last], []byte("\n\n"))+len("\n\n")]
	if len(skipped) < len("\n\n") || e.json.plan.mayBeIn(skipped) {
		return b
	}
	for line := range bytes.Lines(skipped) {
		if data, ok := bytes.CutPrefix(bytes.TrimSuffix(line, []byte("\n")), []byte(dataField)); ok {
			e.size += int64(len(bytes.TrimPrefix(data, []byte(" "))))
		}
	}
	return b[len(skipped):]
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
