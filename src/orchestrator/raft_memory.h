/* What libraft asks of its host (struct raft_io): what must outlive the process goes to a store (raft_store.h),
 * messages go out through a function of the owner's.
 *
 * Where something can't be kept, or libraft takes part no more (RAFT_UNAVAILABLE: it had no memory), the member gives
 * up: from then on it sends nothing, hears nothing, and libraft hears of nothing, as if its process had been killed in
 * that moment. What the store holds is what a process would find that is started again; so this one may go on with it,
 * as another one would: close raft, and begin anew with the store. One thread. */
#ifndef EVEN_ORCHESTRATOR_RAFT_MEMORY_H
#define EVEN_ORCHESTRATOR_RAFT_MEMORY_H

#include "orchestrator/raft_store.h"

#include <evenstep/status.h>
#include <raft.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct even_raft_memory {
  struct raft_io io; /* for raft_init; all zero before even_raft_memory_open */
  even_raft_store store;
  uint64_t id;
  unsigned tick_ms;
  uint64_t next_tick_ns;
  raft_io_tick_cb tick;
  raft_io_recv_cb receive;
  uint64_t shown;              /* the last entry of the log that the leader's newest message spoke of */
  bool changed;                /* a part of the log was undone, or has members: they may be others (raft_rules.h) */
  struct even_raft_done *done; /* requests whose callbacks are due */
  struct even_raft_done **done_end;
  bool gave_up;
  even_error why;
  struct raft_io_append *unkept; /* the request that was not done when it gave up; NULL: none */
  raft_io_append_cb unkept_cb;
  void *context;
  /* Sends a message to a member; false: there is no connection to it. */
  bool (*send)(void *context, uint64_t member, const void *bytes, size_t count);
} even_raft_memory;

/* Takes `store` over, which may be that of `memory` itself, when its raft is closed; raft_close on `io` does not close
 * it (even_raft_memory_close does). */
void even_raft_memory_open(even_raft_memory *memory, const even_raft_store *store, void *context,
                           bool (*send)(void *context, uint64_t member, const void *bytes, size_t count));
/* `forget`: as even_raft_store_close. */
void even_raft_memory_close(even_raft_memory *memory, bool forget);
/* A message of another member. EVEN_ERR_INPUT: the bytes are none. */
even_status even_raft_memory_receive(even_raft_memory *memory, uint64_t from, const char *address,
                                     const unsigned char *bytes, size_t count) EVEN_MUST_USE;
/* Calls back for what is done, and ticks where it is time. Often. */
void even_raft_memory_turn(even_raft_memory *memory, uint64_t now_ns);
/* It gives up: the last error says why, and is cleared. */
void even_raft_memory_give_up(even_raft_memory *memory);
/* Why it gave up; NULL: it has not. */
const even_error *even_raft_memory_gave_up(const even_raft_memory *memory);

#endif
