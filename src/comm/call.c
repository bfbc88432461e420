/* The beginning and the end of a collective: every rank announces its call, and
 * all find out together when the calls differ. */
#include "base/checked.h"
#include "base/fail.h"
#include "comm/called.h"
#include "comm/group.h"

#include <stdio.h>
#include <string.h>

/* The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t mix(uint64_t hash, uint64_t value) {
  hash += value + 0x9e3779b97f4a7c15u;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9u;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebu;
  return hash ^ (hash >> 31);
}

static const char *kind_name(uint32_t kind) {
  switch (kind) {
    case EVEN_CALL_OPEN:
      return "opening the group";
    case EVEN_CALL_ALL_REDUCE:
      return "all_reduce";
    case EVEN_CALL_REDUCE_SCATTER:
      return "reduce_scatter";
    case EVEN_CALL_ALL_GATHER:
      return "all_gather";
    case EVEN_CALL_BROADCAST:
      return "broadcast";
    case EVEN_CALL_BARRIER:
      return "barrier";
    case EVEN_CALL_ALL_TO_ALL:
      return "all_to_all";
    case EVEN_CALL_REDUCE:
      return "reduce";
    case EVEN_CALL_GATHER:
      return "gather";
    case EVEN_CALL_SCATTER:
      return "scatter";
    default:
      return "no call";
  }
}

static const char *dtype_name(uint32_t dtype) {
  switch (dtype) {
#define DTYPE_NAME(name, number, bytes) \
  case EVEN_##name:                     \
    return #name;
    EVEN_DTYPE_LIST(DTYPE_NAME)
    default:
      return "?";
  }
}

static const char *op_name(uint32_t op) {
  static const char *const names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};
  return op < sizeof names / sizeof names[0] ? names[op] : "?";
}

void even_call_describe_elements(uint32_t elements, char *text, size_t bytes) {
  if (elements == 0) {
    text[0] = '\0';
  } else if (elements < EVEN_CALLED_OTHER) {
    (void)snprintf(text, bytes, " of %s", dtype_name(elements - EVEN_CALLED_DTYPE(0)));
  } else {
    (void)snprintf(text, bytes, " of another type (%u)", (unsigned)elements);
  }
}

void even_call_describe(const even_comm_call *call, char *text, size_t bytes) {
  unsigned long long count = call->count;
  char elements[48];
  even_call_describe_elements(call->op, elements, sizeof elements);
  switch (call->kind) {
    case EVEN_CALL_ALL_REDUCE:
    case EVEN_CALL_REDUCE_SCATTER:
      (void)snprintf(text, bytes, "%s of %llu %s elements with %s", kind_name(call->kind), count,
                     dtype_name(call->dtype), op_name(call->op));
      break;
    case EVEN_CALL_ALL_GATHER:
      if (call->dtype == EVEN_CALL_BYTES || call->op != 0) {
        (void)snprintf(text, bytes, "all_gather of %llu bytes%s in all", count, elements);
      } else {
        (void)snprintf(text, bytes, "all_gather of %llu %s elements in all", count, dtype_name(call->dtype));
      }
      break;
    case EVEN_CALL_BROADCAST:
    case EVEN_CALL_SCATTER:
      (void)snprintf(text, bytes, "%s of %llu bytes%s from rank %d", kind_name(call->kind), count, elements,
                     (int)call->root);
      break;
    case EVEN_CALL_GATHER:
      (void)snprintf(text, bytes, "gather of %llu bytes%s to rank %d", count, elements, (int)call->root);
      break;
    case EVEN_CALL_ALL_TO_ALL:
      (void)snprintf(text, bytes, "all_to_all%s", elements);
      break;
    case EVEN_CALL_REDUCE:
      (void)snprintf(text, bytes, "reduce of %llu %s elements with %s to rank %d", count, dtype_name(call->dtype),
                     op_name(call->op), (int)call->root);
      break;
    default:
      (void)snprintf(text, bytes, "%s", kind_name(call->kind));
      break;
  }
}

/* The elements of an all-to-all are compared where one rank has some for another: who has none may say any. */
static uint32_t compared_op(const even_comm_call *call) {
  return call->kind == EVEN_CALL_ALL_TO_ALL ? 0 : call->op;
}

bool even_call_differs(const even_comm_call *a, const even_comm_call *b) {
  return a->kind != b->kind || a->dtype != b->dtype || compared_op(a) != compared_op(b) || a->root != b->root ||
         a->count != b->count;
}

/* The group has ended: the status of that end, and its words again. */
static even_status refuse(even_comm *comm) {
  (void)even_fail(comm->ended, "the group is unusable since an earlier failure: %s", comm->ended_what);
  return even_error_fix("close the group and open a new one");
}

static uint64_t arena_offset(const even_comm *comm, const void *data, size_t bytes) {
  uintptr_t begin = (uintptr_t)even_comm_arena_of(comm, comm->rank);
  uintptr_t at = (uintptr_t)data;
  if (data == NULL || at < begin || at - begin > comm->arena_bytes || bytes > comm->arena_bytes - (at - begin)) {
    return EVEN_NOT_IN_ARENA;
  }
  return at - begin;
}

even_status even_call_begin(even_comm *comm, even_call_kind kind, uint32_t dtype, uint32_t op, int root, size_t count,
                            const size_t *counts, const void *arena_data, size_t arena_data_bytes) {
  if (atomic_flag_test_and_set_explicit(&comm->busy, memory_order_acquire)) {
    (void)even_fail(EVEN_ERR_STATE, "two threads called %s of one group at the same time", kind_name(kind));
    return even_error_fix("let one thread at a time call into a group, or give each thread a group of its own");
  }
  even_waits_call();
  comm->waits_since = 0;
  comm->call = (even_comm_call){.kind = kind, .dtype = dtype, .op = op, .root = root, .count = count};
  even_called_take(even_comm_base_of(comm), &comm->call);
  even_status status = EVEN_OK;
  if (atomic_load_explicit(&comm->controls[comm->rank].left, memory_order_relaxed) != 0) {
    status = even_fail(EVEN_ERR_STATE, "rank %d has left the group", comm->rank);
  } else if (comm->ended != EVEN_OK) {
    status = refuse(comm);
  } else if (atomic_load_explicit(&comm->header->state, memory_order_acquire) != EVEN_GROUP_WHOLE) {
    status = even_group_failure(comm);
  }
  if (status != EVEN_OK) {
    return even_call_end(comm, status);
  }
  uint64_t hash = mix(comm->call.kind, dtype);
  hash = mix(mix(mix(hash, compared_op(&comm->call)), (uint64_t)(uint32_t)comm->call.root), comm->call.count);
  for (int rank = 0; counts != NULL && rank < comm->ranks; rank++) {
    hash = mix(hash, counts[rank]);
  }
  comm->call.signature = hash;
  comm->call.piece_bytes = comm->rank == 0 ? even_shared_pieces_word(comm) : 0;
  comm->call.arena_offset = arena_offset(comm, arena_data, arena_data_bytes);
  comm->call_count++;
  size_t parity = comm->call_count & 1u;
  even_comm_control *own = &comm->controls[comm->rank];
  own->call[parity] = comm->call;
  atomic_store_explicit(&own->signature[parity], hash, memory_order_relaxed);
  even_flight_begin(&comm->flight, &comm->call, comm->call_count);
  if (comm->rank == 0) {
    /* Those of the call before last are past it: they have met in the last one. */
    atomic_store_explicit(&comm->header->claim[parity], 0, memory_order_relaxed);
  }
  return EVEN_OK;
}

static even_status mismatch(even_comm *comm, int rank) {
  char own[128];
  char other[128];
  char own_site[EVEN_FLIGHT_SITE_BYTES];
  char other_site[EVEN_FLIGHT_SITE_BYTES];
  even_call_describe(&comm->call, own, sizeof own);
  even_call_describe(&comm->controls[rank].call[comm->call_count & 1u], other, sizeof other);
  even_flight_hear(&comm->flight, comm->rank, own_site, sizeof own_site);
  even_flight_hear(&comm->flight, rank, other_site, sizeof other_site);
  (void)even_fail(EVEN_ERR_MISMATCH, "rank %d called %s%s, but rank %d called %s%s%s (call %llu of the group)",
                  even_comm_number(comm, comm->rank), own, own_site, even_comm_number(comm, rank), other,
                  strcmp(own, other) == 0 ? ", divided otherwise among the ranks" : "", other_site,
                  (unsigned long long)comm->call_count);
  (void)even_error_place(even_comm_number(comm, rank), NULL);
  return even_error_fix(EVEN_CALL_DIFFERS_FIX);
}

even_status even_call_meet(even_comm *comm) {
  size_t parity = comm->call_count & 1u;
  EVEN_TRY(even_stage(comm, &comm->arrival));
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (atomic_load_explicit(&comm->controls[rank].signature[parity], memory_order_relaxed) != comm->call.signature) {
      even_flight_say(&comm->flight);
      even_group_end(comm, EVEN_GROUP_MISMATCH | (uint32_t)comm->rank);
      return mismatch(comm, rank);
    }
  }
  uint64_t pieces = comm->controls[0].call[parity].piece_bytes;
  comm->piece_bytes = (size_t)(pieces & ~(EVEN_PIECES_CHAINED | EVEN_PIECES_TIMED));
  comm->chained = (pieces & EVEN_PIECES_CHAINED) != 0;
  comm->timed = (pieces & EVEN_PIECES_TIMED) != 0;
  return EVEN_OK;
}

even_status even_call_next(even_comm *comm) {
  return even_stage(comm, &comm->progress);
}

even_status even_call_end(even_comm *comm, even_status status) {
  even_flight_end(&comm->flight, status);
  if (status != EVEN_OK && comm->ended == EVEN_OK) {
    comm->ended = status;
    (void)snprintf(comm->ended_what, sizeof comm->ended_what, "%.*s", (int)sizeof comm->ended_what - 1,
                   even_error_last()->what);
  }
  atomic_flag_clear_explicit(&comm->busy, memory_order_release);
  return status;
}

bool even_call_all_in_arena(const even_comm *comm) {
  size_t parity = comm->call_count & 1u;
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (comm->controls[rank].call[parity].arena_offset == EVEN_NOT_IN_ARENA) {
      return false;
    }
  }
  return true;
}

unsigned char *even_call_arena_data(const even_comm *comm, int rank) {
  return even_comm_arena_of(comm, rank) + comm->controls[rank].call[comm->call_count & 1u].arena_offset;
}
