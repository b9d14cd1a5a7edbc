//go:build !linux

package socket

// peerClosed would report whether the peer of a socket has closed its side. Elsewhere no call
// shows that beside unread data.
func peerClosed(uintptr) bool { return false }

// keepUnsent would bound what a socket keeps that it has not sent yet.
func keepUnsent(uintptr, int) {}
