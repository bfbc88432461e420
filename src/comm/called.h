/* What a call is to the script, where the engine is asked for another one that does the same: a gather is made of an
 * all-to-all, a reduce of a reduce-scatter; and which elements the bytes are that are moved. Ranks compare it as they
 * compare the call itself, and it is told where calls differ. */
#ifndef EVEN_COMM_CALLED_H
#define EVEN_COMM_CALLED_H

#include "comm/engine.h"
#include "comm/segment.h"

/* A dtype's number as `elements`; numbers from EVEN_CALLED_OTHER on, below 2^16, are for the caller's other types. */
#define EVEN_CALLED_DTYPE(dtype) ((uint32_t)(dtype) + 1u)
#define EVEN_CALLED_OTHER 256u

typedef struct even_comm_called {
  uint32_t kind;     /* EVEN_CALL_REDUCE, _GATHER, _SCATTER with their root; 0: what the engine is asked for */
  int32_t root;      /* of these */
  uint64_t count;    /* of these: what all ranks name alike; a reduce's elements, else bytes of one rank's part */
  uint32_t elements; /* of a call that does not reduce, and of a message; 0: not said */
  const char *site;  /* of a message that is sent: where, as far as it is known; it is read during that call */
} even_comm_called;

/* Of the calling thread's next collective or message, which takes it. NULL: of none; who has called says so, for a call
 * that is refused may not have come to take it. */
void even_comm_call_as(const even_comm_called *called);

/* Of an engine, at a call's beginning: writes into `call` what was said of it, on this thread or (elements) of all
 * calls of the group, and keeps none of it for another. */
void even_called_take(const even_comm_base *base, even_comm_call *call);
/* The same at a message's beginning. */
even_comm_called even_called_take_message(void);
/* The calling thread's next collective, of a part of a larger group, is to that part what `call` is to the whole. */
void even_called_again(const even_comm_call *call);
/* The elements of all calls of a part of a larger group, as of the call under way there. */
void even_called_pass_on(const even_comm_call *call, even_comm *part);

#define EVEN_MESSAGE_DIFFERS_FIX \
  "give both ends tensors of one size and dtype, and messages that differ tags that differ"

/* Between two ranks, of a message or of a part of an all-to-all: whether what one sends as `sent` may be received as
 * `received`. Bytes (U8) are whatever the other side says they are: who passes on what it does not look at names
 * nothing else. */
bool even_called_fits(uint32_t sent, uint32_t received);

#endif
