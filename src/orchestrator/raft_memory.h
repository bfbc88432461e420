/* What libraft asks of its host (struct raft_io): what must outlive the process goes to a store (raft_store.h),
 * messages go out through a function of the owner's. One thread. */
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
  bool undone;                 /* a part of the log was: members may be others (raft_rules.h) */
  struct even_raft_done *done; /* requests whose callbacks are due */
  struct even_raft_done **done_end;
  void *context;
  /* Sends a message to a member; false: there is no connection to it. */
  bool (*send)(void *context, uint64_t member, const void *bytes, size_t count);
} even_raft_memory;

/* Takes `store` over; raft_close on `io` does not close it (even_raft_memory_close does). */
void even_raft_memory_open(even_raft_memory *memory, const even_raft_store *store, void *context,
                           bool (*send)(void *context, uint64_t member, const void *bytes, size_t count));
/* `forget`: as even_raft_store_close. */
void even_raft_memory_close(even_raft_memory *memory, bool forget);
/* A message of another member. EVEN_ERR_INPUT: the bytes are none. */
even_status even_raft_memory_receive(even_raft_memory *memory, uint64_t from, const char *address,
                                     const unsigned char *bytes, size_t count) EVEN_MUST_USE;
/* Calls back for what is done, and ticks where it is time. Often. */
void even_raft_memory_turn(even_raft_memory *memory, uint64_t now_ns);

#endif
