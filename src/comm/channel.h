/* A stream of messages from one rank to another, through a ring in the segment. */
#ifndef EVEN_COMM_CHANNEL_H
#define EVEN_COMM_CHANNEL_H

#include "comm/group.h"

/* What precedes every message in the stream; messages are padded to its size. */
typedef struct even_message_header {
  uint64_t tag;
  uint64_t what; /* its bytes, and in the upper bits where it was sent, and which elements they are (called.h) */
} even_message_header;
#define EVEN_MESSAGE_ELEMENTS_SHIFT 48
#define EVEN_MESSAGE_SITE_SHIFT 43
#define EVEN_MESSAGE_MOST_BYTES (((uint64_t)1 << EVEN_MESSAGE_SITE_SHIFT) - 1)

/* Puts as many of `bytes` at `data` into the stream to rank `to` as there is room for, in multiples of a header's size
 * (the last may be shorter: it is padded); returns how many. */
size_t even_channel_write(even_comm *comm, int to, const void *data, size_t bytes);
/* Takes up to `bytes` out of the stream from rank `from`, with the padding that follows the last; returns how many. */
size_t even_channel_read(even_comm *comm, int from, void *data, size_t bytes);

#endif
