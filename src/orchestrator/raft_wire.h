/* Messages of Raft (libraft's) as bytes, and back: pure. Numbers are 64 bits, little-endian; sizes are compared with
 * what is there before any memory is taken. Snapshots are not sent: the log is short, and whole on every member. */
#ifndef EVEN_ORCHESTRATOR_RAFT_WIRE_H
#define EVEN_ORCHESTRATOR_RAFT_WIRE_H

#include "base/text.h"

#include <raft.h>
#include <stdint.h>

enum { EVEN_RAFT_WIRE_MOST = 1 << 20 };

/* Appends a message. Of entries, as many as fit into EVEN_RAFT_WIRE_MOST bytes: the others follow, once these are
 * there. EVEN_ERR_UNSUPPORTED: one of a kind that is not sent. */
even_status even_raft_wire_write(const struct raft_message *message, even_text *out) EVEN_MUST_USE;
/* Reads a message, but for who sent it. Its entries are of raft_malloc, and go over to raft with it
 * (even_raft_wire_drop where they do not). EVEN_ERR_INPUT: the bytes are no message. */
even_status even_raft_wire_read(const unsigned char *bytes, size_t count, struct raft_message *out) EVEN_MUST_USE;
void even_raft_wire_drop(struct raft_message *message);

#endif
